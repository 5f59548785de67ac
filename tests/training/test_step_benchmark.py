"""scripts.benchmark_step: what the bound counts, shapes, profile and table; then all parts on a tiny model."""

import json
import math
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptiveload.models.attention import AttentionBatch
from adaptiveload.models.mmdit import MMDiTConfig
from adaptiveload.models.wan import WanConfig
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.config import load_config
from adaptiveload.training.cost import model_dims
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.kernel_profile import Span, idle_share_of, kernel_table, profiled_spans
from adaptiveload.training.step_bound import attention_flops, block_work, measure_bound
from scripts import benchmark_step
from scripts.benchmark_step import COMPILED, SUBJECTS, Diffusers, markdown, measure, parse_case, shape_of
from tests.launching import ROOT, environment


@pytest.mark.parametrize("model", [WanConfig(), MMDiTConfig(num_layers=16, num_attention_heads=12, text_dim=4096)])
def test_bound_counts_the_flops_of_the_model(model: WanConfig | MMDiTConfig) -> None:
    work = block_work(model, 2, 32_760)
    forward = sum(product.count * product.flops for product in work.matmuls)
    forward += sum(attention_flops(call, model.hidden_size)[0] for call in work.attention)
    whole = 2 * model_dims(model).forward_flops(32_760, model.text_len)
    # Embeddings and head are under 0.2 %; the MMDiT's last block leaves out some of its text.
    assert model.num_layers * forward == pytest.approx(whole, rel=2e-3)
    assert attention_flops(AttentionBatch(1, 10, 20), 8) == (4 * 10 * 20 * 8, 10 * 10 * 20 * 8)


def test_bound_counts_the_bytes_of_memory_bound_ops() -> None:
    # bf16 stream, D = 24, F = 48, 100 tokens, 8 text rows. Gated norms 8 + 12, ungated 8 + 10, the rest 4 + 6 bytes.
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 48, "num_layers": 2, "text_len": 8}
    wan = WanConfig(**sizes, residual_fp32=False)
    assert block_work(wan, 1, 100).bytes_moved == 100 * (24 * (2 * 20 + 18 + 3 * 10) + 48 * 10) + 8 * 24 * 10
    fp32 = block_work(WanConfig(**sizes), 1, 100).bytes_moved
    assert fp32 - block_work(wan, 1, 100).bytes_moved == 100 * 24 * 3 * 10  # five accesses of the stream a norm


def test_bound_is_measured() -> None:
    bound = measure_bound(
        WanConfig(num_attention_heads=2, attention_head_dim=12, ffn_dim=48, num_layers=2, text_len=8),
        2, 16, torch.device("cpu"), torch.float32,
    )  # fmt: skip
    assert bound.ms == pytest.approx(bound.matmul_ms + bound.attention_ms + bound.memory_ms)
    assert min(bound.matmul_ms, bound.attention_ms, bound.memory_ms, *bound.rates.values()) > 0
    assert {"mm 32x24x48 weight gradient", "attention 2x16x8 backward", "copy GB/s"} <= set(bound.rates)


def test_shapes_by_tokens_or_by_pixels() -> None:
    geometry = LatentGeometry()
    assert shape_of(32_760, geometry) == Shape(81, 480, 832)
    assert shape_of(1560, geometry) == Shape(1, 480, 832)
    assert shape_of(7800, geometry) == Shape(17, 480, 832)
    assert parse_case("3x81x480x832", geometry).name == "3x32760"
    for tokens in (1, 7, 256, 4096, 52_800, 75_600):
        assert parse_case(f"2x{tokens}", geometry).seq_len == tokens
    for text, error in (("4", "is not BATCHx"), ("1x2x3", "is not BATCHx"), ("1x0", "at least 1"), ("1x2x16x16", "4k")):
        with pytest.raises(ValueError, match=error):
            parse_case(text, geometry)


def test_profile_names_kernels_and_counts_gaps() -> None:
    spans = [Span("gemm", 0, 10), Span("copy", 5, 10), Span("gemm", 30, 10)]
    assert idle_share_of(spans) == pytest.approx(15 / 40)  # 15 to 30
    assert idle_share_of([]) == 0
    lines = kernel_table(spans).splitlines()
    assert "idle share 0.375" in lines[0]
    assert lines[-2].split()[2:] == ["2", "10.0", "gemm"]
    assert profiled_spans(lambda: torch.ones(3).add(1), torch.device("cpu"))


def test_table_has_ratios_and_says_what_failed() -> None:
    base = {"shape": "1x480x832", "case": "2x1560", "batch_size": 2, "seq_len": 1560}
    rows = [
        base | {"part": "bound", "recompute": "none", "ms": 100.0},
        base | {"part": "ours", "recompute": "full", "ms": 125.0, "peak_gib": 3.0, "kb_per_token": 10.0},
        base | {"part": "ours", "recompute": "none", "error": "OutOfMemoryError: no room"},
        base | {"part": "diffusers", "recompute": "full", "ms": 250.0, "peak_gib": 3.0, "kb_per_token": 9.0},
    ]
    text = markdown("a GPU", rows, {"2x1560": 10**12}, 1e14)
    assert "| 2x1560 (1x480x832) | ours | full | 125.0 | 1.250 | 2.000 | - | 24,960 | 0.080 | 3.0 | 10 |" in text
    assert "| ours | none | OutOfMemoryError: no room |" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {12}


def test_what_is_compiled_is_compiled_for_each_shape(
    ranks: Ranks, run_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the second shape runs blocks that are compiled for any."""
    made: list[str] = []
    compiled: list[dict[str, Any]] = []

    def maker(part: str) -> Any:
        return lambda *_: made.append(part) or part

    for part in ("ours", *COMPILED):
        monkeypatch.setitem(SUBJECTS, part, maker(part))
    monkeypatch.setattr(benchmark_step, "measure_step", lambda *_: {"ms": 1.0})
    monkeypatch.setattr(torch._dynamo, "reset", lambda: made.append("reset"))
    config = load_config(run_config)
    cases = [parse_case(text, LatentGeometry()) for text in ("1x16", "2x16")]
    options = Namespace(parts=["ours", *COMPILED], recompute=["none", "full"])
    assert len(list(measure(options, config, cases, ranks, math.inf))) == 2 * (2 + 2 + 1)
    each = [name for part in COMPILED for name in ("reset", part) * 2]
    assert made == ["ours", *each]

    monkeypatch.setattr(torch.nn.Module, "compile", lambda _, **options: compiled.append(options))
    Diffusers(config, ranks, compiled=True)
    assert compiled == [{"dynamic": False}] * config.model.num_layers


def test_parts_run_and_a_bad_one_is_a_row(run_config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.benchmark_step", str(run_config), "--shapes", "2x16", "--profile"]
    command += ["--parts", "bound", "ours", "diffusers", "--recompute", "bogus", "attention:500", "--repeats", "1"]
    subprocess.run([*command, "--output", str(tmp_path)], cwd=ROOT, env=environment(), check=True, capture_output=True)
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert [(row["part"], row["recompute"], "error" in row) for row in rows] == [
        ("bound", "none", False),
        ("ours", "bogus", True),
        ("ours", "attention:500", False),
        ("diffusers", "full", False),
    ]
    assert "kernel" in (tmp_path / "profile-ours-attention-500-2x16.txt").read_text()
