"""On two ranks: only what is named is trained, checkpoints hold that alone, and broken steps are skipped by all."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.checkpoint import FileSystemReader

from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.shard_writer import DatasetWriter
from adaptiveload.data.text import HashTextEncoder
from adaptiveload.models.wan import WanConfig
from tests.launching import launch
from tests.training.finetune_cases import PARTS

# bf16 holds it, and the text embedder's sums overflow.
HUGE = 3e38


class OverflowingTextEncoder(HashTextEncoder):
    """Finite embeddings, of which those of captions with "huge" overflow in the first layer that reads them."""

    def encode(self, captions):
        return [
            np.full_like(text, HUGE) if "huge" in caption else text
            for caption, text in zip(captions, super().encode(captions), strict=True)
        ]


def write_broken(root: Path, huge: set[int], broken: dict[int, float]) -> None:
    """24 pictures; the captions of some overflow, and the latents of some are not finite."""
    root.mkdir(parents=True)
    writer = DatasetWriter(root, DctCodec(), OverflowingTextEncoder(dim=16, max_len=8), samples_per_shard=8)
    rng = np.random.default_rng(0)
    for i in range(24):
        latents = rng.standard_normal((16, 1, 4, 4)).astype(np.float32)
        if i in broken:
            latents[0, 0, 0, 0] = broken[i]
        with np.errstate(over="ignore"):
            latents = latents.astype(np.float16)
        caption = f"{'huge' if i in huge else 'usual'} number {i}"
        meta = {"frames": 1, "height": 32, "width": 32, "fps": 16.0}
        writer.write(f"sample{i:03d}", f"clip{i}", latents, caption, meta)
    writer.finish()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finetune")


@pytest.fixture(scope="module")
def results(run_config: Path, folder: Path) -> dict:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    write_broken(folder / "one", huge={5}, broken={3: np.nan, 13: np.inf, 22: 1e5})
    write_broken(folder / "all", huge=set(range(24)), broken={})
    config = yaml.safe_load(run_config.read_text()) | {"output_dir": str(folder / "runs")}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    torch.manual_seed(7)
    WanTransformer3DModel(**WanConfig(**config["model"]).to_diffusers()).save_pretrained(folder / "given")
    launch(folder / "run.yaml", folder / "given", folder, ranks=2, script="tests/training/finetune_cases.py")
    return json.loads((folder / "results.json").read_text())


def test_only_what_is_named_is_trained(results: dict) -> None:
    moved = {name: set(names) for name, names in results["moved"].items()}
    attention = [f"blocks.{i}.attn{j}.{part}" for i in (0, 1) for j in (1, 2) for part in ("to_q", "to_out.0")]
    assert {f"{layer}.lora_{side}.default.weight" for layer in attention for side in "AB"} < moved["lora"]
    assert len(moved["lora"]) == 2 * 16
    own = {name for name in moved["lora-and-a-part"] if "lora" not in name}
    assert own == {"proj_out.weight", "proj_out.bias"}
    assert {name.split(".lora")[0] for name in moved["lora-and-a-part"] - own} == {
        f"blocks.1.attn1.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0")
    }
    assert moved["a-part"]
    # Its modulation table is diffusers' blocks.1.scale_shift_table.
    assert all(name.startswith(("blocks.1.", "modulation.blocks.1")) for name in moved["a-part"])
    assert not any(name.endswith(".bias") for name in moved["a-part"])


def test_checkpoints_hold_what_is_trained_alone(results: dict, folder: Path) -> None:
    for name in PARTS:
        (path,) = (folder / "runs" / name / "checkpoints").glob("step-00000003")
        stored = set(FileSystemReader(path).read_metadata().state_dict_metadata)
        moments = ("exp_avg", "exp_avg_sq", "step")
        assert stored == {
            key
            for n in results["moved"][name]
            for key in (f"model/{n}", f"ema/{n}", *(f"optimizer/{n}/{moment}" for moment in moments))
        }


def test_adapters_resume_to_the_bit(results: dict) -> None:
    assert results["resumed"] == [True, True]


def test_frozen_weights_in_bf16_change_no_bit(results: dict) -> None:
    found = results["rounded"]
    assert found["equal"]
    assert found["gradient"] > 1e-4, "equal because all is zero?"
    assert found["lora"] == ["torch.float32"]
    assert "blocks.0.attn1.to_q.base_layer.weight" in found["bf16"]
    assert not any(part in name for name in found["bf16"] for part in ("time_", "modulation", "proj_out"))


def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(results: dict, folder: Path) -> None:
    """Case C39: NaN, infinity and fp16 overflow in stored latents are lost samples; one that arises later skips."""
    mine, other = results["skipped"]["one"]
    assert mine == other, "ranks must agree on steps, counts and state"
    total, steps, is_finite, stays, error, keys = mine
    assert error is None
    expected = [step for step, names in enumerate(keys) if "sample005" in names]
    assert 2 <= len(expected) == total < 6
    assert steps == [6 - total], "the optimizer's own count"
    assert is_finite
    assert not stays
    rows = [json.loads(line) for line in (folder / "runs" / "one" / "skipped.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == expected
    named = [[key for keys in row["samples"].values() for key in keys] for row in rows]
    assert named == [["sample005"]] * total, "the sample alone, not its neighbours"
    lost = [json.loads(line)["key"] for line in (folder / "runs" / "one" / "lost.jsonl").read_text().splitlines()]
    assert set(lost) == {"sample003", "sample013", "sample022"}
    metrics = [json.loads(line) for line in (folder / "runs" / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/num_skipped"] for row in metrics] == [sum(s <= step for s in expected) for step in range(6)]
    assert [row["train/loss"] is None for row in metrics] == [step in expected for step in range(6)]
    # The learning rate goes by the step, skipped or not (case C41).
    assert len({row["train/lr"] for row in metrics}) == 1


def test_too_many_skipped_steps_in_a_row_stop_all_ranks(results: dict, folder: Path) -> None:
    mine, other = results["skipped"]["all"]
    assert mine == other
    total, steps, is_finite, stays, error, _ = mine
    assert (total, steps, is_finite, stays) == (3, [], True, True)
    assert "step 2 is skipped" in error
    assert "optimizer.max_skipped_in_a_row=2" in error
    assert "rank 0: sample" in error
    assert "rank 1: sample" in error
    assert "skipped.jsonl" in error
