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
from adaptiveload.models.flow_matching import timesteps
from adaptiveload.models.mmdit import MMDiTConfig
from adaptiveload.models.packing import PackedSample, pack, patchify
from adaptiveload.models.wan import WanConfig, WanTransformer
from adaptiveload.training.config import load_config
from adaptiveload.training.optimizer import OptimizerConfig, learning_rate
from adaptiveload.training.trained_weights import TrainedWeights
from scripts.export import export_run
from tests.launching import launch
from tests.training.finetune_cases import PARTS

# bf16 holds it, and the text embedder's sums overflow.
HUGE = 3e38
MMDIT = {
    "architecture": "mmdit", "num_attention_heads": 2, "attention_head_dim": 12, "axes_dims_rope": [4, 4, 4],
    "num_layers": 2, "text_dim": 16, "text_len": 8,
}  # fmt: skip


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
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    write_broken(folder / "one", huge={5}, broken={3: np.nan, 13: np.inf, 22: 1e5})
    write_broken(folder / "all", huge=set(range(24)), broken={})
    config = yaml.safe_load(run_config.read_text()) | {"output_dir": str(folder / "runs")}
    wan, mmdit = WanConfig(**config["model"]), MMDiTConfig(**MMDIT)
    (folder / "wan.yaml").write_text(yaml.safe_dump(config))
    (folder / "mmdit.yaml").write_text(yaml.safe_dump(config | {"model": MMDIT}))
    for seed, name in ((7, "given-wan"), (8, "given-wan-changed")):
        torch.manual_seed(seed)
        WanTransformer3DModel(**wan.to_diffusers()).save_pretrained(folder / name)
    QwenImageTransformer2DModel(**mmdit.to_diffusers()).save_pretrained(folder / "given-mmdit")
    launch(folder, ranks=2, script="tests/training/finetune_cases.py")
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
    # Of the last block's text nothing is read (docs/models.md): no gradient, and none but zero for its queries.
    unread = tuple(f"transformer_blocks.1.{part}." for part in ("attn.to_add_out", "txt_mlp"))
    assert moved["mmdit"]
    assert [n for n in moved["mmdit"] if ".lora_" not in n or n.startswith(unread)] == []
    assert sum(".lora_B." in name for name in moved["mmdit"]) == 2 * 14 - 4 + 6


def test_checkpoints_hold_what_is_trained_alone(results: dict, folder: Path) -> None:
    for name in PARTS.keys() - {"mmdit"}:  # which also has adapters that nothing reads
        (path,) = (folder / "runs" / name / "checkpoints").glob("step-00000003")
        stored = set(FileSystemReader(path).read_metadata().state_dict_metadata)
        moments = ("exp_avg", "exp_avg_sq", "step")
        assert stored == {
            key
            for n in results["moved"][name]
            for key in (f"model/{n}", f"ema/{n}", *(f"optimizer/{n}/{moment}" for moment in moments))
        }


def read_rows(run_dir: Path, key: str = "train/loss") -> list[dict]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if key in row]


def test_adapters_resume_to_the_bit(results: dict, folder: Path) -> None:
    for is_same, message in results["resumed"]:
        assert is_same
        assert "made with model.pretrained='" in message
    # The learning rate goes by the step, over a resume too (case c41).
    lr = [learning_rate(OptimizerConfig(lr=1e-3, warmup_steps=8), step) for step in range(6)]
    for name in ("straight", "resumed"):
        assert [row["train/lr"] for row in read_rows(folder / "runs" / name)] == lr


def test_diffusers_weights_are_trained_and_come_back_with_equal_outputs(results: dict, folder: Path) -> None:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    run_dir = folder / "runs" / "three"
    export_run(run_dir, folder / "last", ema=False)
    export_run(run_dir, folder / "averaged", ema=True, max_file_bytes=20_000)
    given, last, averaged = (
        WanTransformer3DModel.from_pretrained(folder / name) for name in ("given-wan", "last", "averaged")
    )
    for name, tensor in given.state_dict().items():
        # Three steps of at most lr = 1e-3 each: both began at the given weights and left them.
        moved, moved_on_average = ((m.state_dict()[name] - tensor).abs().max() for m in (last, averaged))
        assert 0 < moved < 4e-3, name
        assert 0 < moved_on_average <= moved + 1e-6, name
    config = load_config(run_dir / "config.yaml")
    ours, weights = WanTransformer(config.model), TrainedWeights(run_dir, config, averaged=True)
    ours.load_state_dict(weights.read(list(weights.shapes)))
    generator = torch.Generator().manual_seed(0)
    latents, text = torch.randn(1, 16, 3, 4, 6, generator=generator), torch.randn(1, 8, 16, generator=generator)
    batch = pack([PackedSample("k", (3, 2, 3), patchify(latents[0], (1, 2, 2)), torch.zeros(18, 64), 0.7, text[0])])
    with torch.no_grad():
        expected = averaged(latents, torch.tensor([700.0]), text, return_dict=False)[0][0]
        found = ours(batch.latents, timesteps(batch), batch)
    torch.testing.assert_close(found, patchify(expected, (1, 2, 2)), rtol=0, atol=1e-5)


def test_training_goes_on_from_exported_weights(results: dict, folder: Path) -> None:
    assert "continued" in results
    first, read, tuned = (read_rows(folder / "runs" / name, "train/loss") for name in ("first", "read", "tuned"))
    held_out = [read_rows(folder / "runs" / name, "train/loss_heldout")[-1] for name in ("first", "read")]
    # The same weights on the same draws; the export keeps every bit.
    assert held_out[1]["train/loss_heldout"] == pytest.approx(held_out[0]["train/loss_heldout"], rel=1e-6)
    # Step by step the same samples and noise: the second run begins where the first one's curve ended.
    losses = [np.array([row["train/loss"] for row in rows]) for rows in (first, tuned)]
    assert len(losses[0]) == len(losses[1]) == 8
    assert (losses[1] < losses[0])[:4].all(), losses
    assert losses[1].mean() < losses[0].mean()
    assert len(read) == 1


def test_frozen_weights_in_bf16_change_no_bit(results: dict) -> None:
    found = results["rounded"]
    assert found["equal"]
    assert found["gradient"] > 1e-4, "equal because all is zero?"
    assert found["lora"] == ["torch.float32"]
    assert "blocks.0.attn1.to_q.base_layer.weight" in found["bf16"]
    assert not any(part in name for name in found["bf16"] for part in ("time_", "modulation", "proj_out"))


def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(results: dict, folder: Path) -> None:
    """Case c39: NaN, infinity and fp16 overflow in stored latents are lost samples; one that arises later skips."""
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
    metrics = read_rows(folder / "runs" / "one")
    assert [row["train/num_skipped"] for row in metrics] == [sum(s <= step for s in expected) for step in range(6)]
    assert [row["train/loss"] is None for row in metrics] == [step in expected for step in range(6)]
    # The learning rate goes by the step, skipped or not (case c41).
    lr = [learning_rate(OptimizerConfig(lr=1e-3, warmup_steps=8), step) for step in range(6)]
    assert [row["train/lr"] for row in metrics] == lr


def test_too_many_skipped_steps_in_a_row_stop_all_ranks(results: dict, folder: Path) -> None:
    mine, other = results["skipped"]["all"]
    assert mine == other
    total, steps, is_finite, stays, error, _ = mine
    assert (total, steps, is_finite, stays) == (3, [0], True, True)
    assert "step 2 is skipped" in error
    assert "optimizer.max_skipped_in_a_row=2" in error
    assert "rank 0: sample" in error
    assert "rank 1: sample" in error
    assert "skipped.jsonl" in error
