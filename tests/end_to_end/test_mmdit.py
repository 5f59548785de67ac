"""VideoMMDiT by train.py on two ranks: planned with its text priced, from diffusers weights and back to diffusers."""

import json
import re
from pathlib import Path

import numpy as np
import torch
import yaml

from adaptiveload.models.mmdit import MMDiTConfig
from adaptiveload.scheduling.cost import analytic_prior
from adaptiveload.training.config import load_config
from adaptiveload.training.cost import model_dims
from scripts.export import export_run
from tests.launching import launch

MODEL = {
    "architecture": "mmdit", "num_attention_heads": 2, "attention_head_dim": 12, "axes_dims_rope": [4, 4, 4],
    "num_layers": 2, "text_dim": 16, "text_len": 8,
}  # fmt: skip


def test_trains_on_two_ranks_from_diffusers_weights_and_back(run_config: Path, tmp_path: Path) -> None:
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

    torch.manual_seed(7)
    given = QwenImageTransformer2DModel(**MMDiTConfig(**MODEL).to_diffusers())
    given.save_pretrained(tmp_path / "given", max_shard_size="20KB")
    config = yaml.safe_load(run_config.read_text()) | {"model": MODEL, "max_steps": 12, "output_dir": str(tmp_path)}
    path = tmp_path / "mmdit.yaml"
    path.write_text(yaml.safe_dump(config))
    launch(path, "name=two", f"model.pretrained={tmp_path / 'given'}", "data.num_workers=1", ranks=2)
    rows = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    losses = np.array([row["train/loss"] for row in rows if "train/loss" in row])
    assert len(losses) == 12
    assert losses[-4:].mean() < losses[:4].mean(), "12 steps of random weights' loss, from about 2.4"
    # Held-out draws are counted once by their sigma and once by their bucket.
    held_out = next(row for row in rows if "train/loss_heldout" in row)
    for kind in ("sigma_", "[0-9]+x[0-9]+x"):
        parts = [value for key, value in held_out.items() if re.match(f"heldout/loss_{kind}", key)]
        assert len(parts) > 1
        assert min(parts) <= held_out["train/loss_heldout"] <= max(parts)
    # Plans price each sample by its tokens and its text together.
    config = load_config(tmp_path / "two" / "config.yaml")
    prior = analytic_prior(model_dims(config.model), "cpu", "none")
    plan = json.loads((tmp_path / "two" / "schedule.jsonl").read_text().splitlines()[0])
    without_text = prior.a_us + sum(prior.b1_us * tokens for slot in plan["num_tokens"] for tokens in slot)
    assert sum(map(sum, plan["costs_us"])) > without_text
    export_run(tmp_path / "two", tmp_path / "out", ema=False)
    opened = QwenImageTransformer2DModel.from_pretrained(tmp_path / "out").state_dict()
    changed = [name for name, tensor in given.state_dict().items() if not torch.equal(opened[name], tensor)]
    kept = set(opened) - set(changed)
    # What the last block's text would go through has no gradient and stays, to the bit; its queries' one is zero.
    parts = ("to_add_out", "txt_mlp", "add_q_proj", "norm_added_q")
    assert kept
    assert all("transformer_blocks.1." in name and any(part in name for part in parts) for name in kept), kept
