"""Weights from diffusers into a run and out again, by train.py and scripts.export."""

from pathlib import Path

import pytest
import torch
import yaml

from adaptiveload.models.wan import WanConfig
from scripts.export import export_run
from tests.launching import launch, run_script


@pytest.fixture(scope="module")
def model_config(run_config: Path) -> WanConfig:
    return WanConfig(**yaml.safe_load(run_config.read_text())["model"])


def test_diffusers_weights_are_trained_and_exported(run_config: Path, model_config: WanConfig, tmp_path: Path) -> None:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(7)
    given = WanTransformer3DModel(**model_config.to_diffusers())
    given.save_pretrained(tmp_path / "given", max_shard_size="20KB")
    options = (f"output_dir={tmp_path}", "name=tuned", "max_steps=3", "data.held_out_share=0")
    launch(run_config, *options, f"model.pretrained={tmp_path / 'given'}", ranks=2)
    export_run(tmp_path / "tuned", tmp_path / "last", ema=False)
    export_run(tmp_path / "tuned", tmp_path / "averaged", ema=True, max_file_bytes=20_000)
    last, averaged = (
        WanTransformer3DModel.from_pretrained(tmp_path / name).state_dict() for name in ("last", "averaged")
    )
    for name, tensor in given.state_dict().items():
        # Three steps of at most lr = 1e-3 each: both began at the given weights and left them.
        assert not torch.equal(last[name], tensor), name
        assert (last[name] - tensor).abs().max() < 4e-3, name
        assert 0 < (averaged[name] - tensor).abs().max() <= (last[name] - tensor).abs().max() + 1e-6, name
    refused = run_script("export", "--run", tmp_path / "tuned", "--output", tmp_path / "last", check=False)
    assert refused.returncode == 1
    assert "not empty" in refused.stderr
