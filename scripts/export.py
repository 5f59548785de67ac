"""Write what a run has trained for diffusers: its weights as a transformer folder, or its adapters as a LoRA file.

    python -m scripts.export --run runs/quickstart --output exported --ema

A run with adapters (`lora.rank`) gives `pytorch_lora_weights.safetensors`, for `pipeline.load_lora_weights`; with
--merge a folder for `from_pretrained`, the adapters added to the weights that they were trained on.
Runs on one process, on the CPU; memory holds one file's tensors (10 GB at most) at a time.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from adaptiveload.models.lora import save_adapters
from adaptiveload.models.pretrained import MAX_FILE_BYTES, save_pretrained
from adaptiveload.training.config import load_config
from adaptiveload.training.failures import ending_in_words
from adaptiveload.training.trained_weights import TrainedWeights


def export_run(
    run_dir: Path, output: Path, *, ema: bool, merge: bool = False, max_file_bytes: int = MAX_FILE_BYTES
) -> int:
    """Export the latest checkpoint of the run in `run_dir` to the new folder `output`; returns its steps.

    Args:
        run_dir: Folder of the run.
        output: Folder to write; must be new or empty.
        ema: The averaged weights instead of the last ones.
        merge: Of a run with adapters: the whole transformer with the adapters added, instead of these alone.
        max_file_bytes: Files are cut before they grow beyond it.

    Raises:
        ValueError: If the run has no checkpoint, `output` has files, `merge` does not fit the run, or frozen weights
            are needed that are not those of its training any more.
    """
    config = load_config(run_dir / "config.yaml")
    adapters_only = bool(config.lora.rank) and not merge
    weights = TrainedWeights(run_dir, config, averaged=ema, adapters_only=adapters_only)
    if merge and not config.lora.rank:
        raise ValueError(f"--merge, but {run_dir} has lora.rank=0: there are no adapters, its weights are whole")
    if adapters_only:
        if weights.trains_own:
            raise ValueError(
                f"{run_dir} trained model.trainable={config.model.trainable} beside its adapters, which no LoRA file "
                "can hold: use --merge"
            )
        save_adapters(output, weights.adapters(), weights.scale)
        return weights.step

    content = {"_class_name": config.model.diffusers_class, **config.model.to_diffusers()}
    save_pretrained(output, content, weights.shapes, weights.read, max_file_bytes)
    return weights.step


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, for example runs/quickstart")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must be new or empty")
    parser.add_argument("--ema", action="store_true", help="the averaged weights instead of the last ones")
    parser.add_argument("--merge", action="store_true", help="of a run with adapters: the whole transformer with them")
    parser.add_argument("--max-file-mb", type=int, default=10_000, help="files are cut before they grow beyond it")
    options = parser.parse_args(arguments)
    if options.max_file_mb < 1:
        parser.error(f"--max-file-mb {options.max_file_mb}: must be at least 1")
    with ending_in_words("export"):
        max_file_bytes = options.max_file_mb * 10**6
        steps = export_run(
            options.run, options.output, ema=options.ema, merge=options.merge, max_file_bytes=max_file_bytes
        )
    print(f"{'averaged' if options.ema else 'last'} weights of step {steps}: {options.output}")


if __name__ == "__main__":
    main()
