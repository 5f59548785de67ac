"""scripts.sample and scripts.export in this process, on runs of no steps: what they refuse, and that they say so early."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from adaptiveload.models.wan import WanConfig
from adaptiveload.training.config import load_config
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.run import build_run
from scripts.export import export_run
from scripts.sample import parse_args, sample


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(0, 1, torch.device("cpu"), dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def write_run(run_config: Path, ranks: Ranks, folder: Path, *keys: str) -> Path:
    """A run in `folder` with a checkpoint of what it begins with."""
    settings = (f"output_dir={folder}", "name=run", "evaluation.max_samples=0", *keys)
    run = build_run(load_config(run_config, settings), ranks)
    run.checkpointer.save(0, {"num_lost": 0, "num_skipped": 0, "position": 0, **run.schedule.identity})
    run.feed.close()
    if run.tracker is not None:
        run.tracker.close()
    return folder / "run"


def save_weights(config: WanConfig, folder: Path, seed: int) -> None:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(seed)
    WanTransformer3DModel(**config.to_diffusers()).save_pretrained(folder)


@pytest.mark.parametrize("trained", ["lora.rank=2", "model.trainable=[blocks.1]"])
def test_other_frozen_weights_are_refused_wherever_they_are_read(
    run_config: Path, ranks: Ranks, tmp_path: Path, trained: str
) -> None:
    config, given = load_config(run_config).model, tmp_path / "given"
    save_weights(config, given, seed=7)
    keys = (trained, f"model.pretrained={given}")
    run_dir = write_run(run_config, ranks, tmp_path, *keys)
    has_adapters = trained.startswith("lora")
    options = parse_args(["--run", str(run_dir), "--num-samples", "1", "--steps", "1"])
    export_run(run_dir, tmp_path / "whole", ema=True, merge=has_adapters)
    assert sample(options, ranks).is_file()
    save_weights(config, given, seed=8)
    with pytest.raises(ValueError, match=r"made with model\.pretrained="):
        export_run(run_dir, tmp_path / "other", ema=True, merge=has_adapters)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match=r"made with model\.pretrained="):
        sample(options, ranks)
    with pytest.raises(ValueError, match=r"made with model\.pretrained="):
        write_run(run_config, ranks, tmp_path, *keys)
    if has_adapters:
        export_run(run_dir, tmp_path / "adapters", ema=True)  # reads nothing of what changed
