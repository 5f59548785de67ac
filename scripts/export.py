"""Write a run's weights as a diffusers transformer folder, for `VideoTransformer3DModel.from_pretrained`.

    python -m scripts.export --run runs/quickstart --output exported --ema

Runs on one process, on the CPU; memory holds one file's tensors (10 GB at most) at a time.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from adaptiveload.models.architectures import new_transformer
from adaptiveload.models.pretrained import MAX_FILE_BYTES, save_pretrained
from adaptiveload.training.checkpoint import latest, read_state
from adaptiveload.training.config import load_config


def export_run(run_dir: Path, output: Path, *, ema: bool, max_file_bytes: int = MAX_FILE_BYTES) -> int:
    """Export the latest checkpoint of the run in `run_dir` to the new folder `output`; returns its steps.

    Args:
        run_dir: Folder of the run.
        output: Folder to write; must be new or empty.
        ema: The averaged weights instead of the last ones.
        max_file_bytes: Files are cut before they grow beyond it.

    Raises:
        ValueError: If the run has no checkpoint, or `output` has files.
    """
    config = load_config(run_dir / "config.yaml")
    checkpoint = latest(run_dir / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"{run_dir}/checkpoints holds no checkpoint: train first")
    with torch.device("meta"):
        model = new_transformer(config.model)
    ours = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = model.diffusers_parameters()
    kind = "ema" if ema else "model"

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty(parameters[name].shape) for name in names}
        stored = {f"{kind}/{ours[id(parameters[name])]}": tensor for name, tensor in tensors.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as meant: one process reads all
            dcp.load(stored, checkpoint_id=checkpoint, no_dist=True)
        return tensors

    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    content = {"_class_name": config.model.diffusers_class, **config.model.to_diffusers()}
    save_pretrained(output, content, shapes, read, max_file_bytes)
    return int(read_state(checkpoint)["step"])


def main() -> None:
    """Command line of the export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, for example runs/quickstart")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must be new or empty")
    parser.add_argument("--ema", action="store_true", help="the averaged weights instead of the last ones")
    parser.add_argument("--max-file-mb", type=int, default=10_000, help="files are cut before they grow beyond it")
    options = parser.parse_args()
    try:
        max_file_bytes = options.max_file_mb * 10**6
        steps = export_run(options.run, options.output, ema=options.ema, max_file_bytes=max_file_bytes)
    except ValueError as error:
        sys.exit(f"export: {error}")
    print(f"{'averaged' if options.ema else 'last'} weights of step {steps}: {options.output}")


if __name__ == "__main__":
    main()
