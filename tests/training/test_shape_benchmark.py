"""The shape benchmark in this process: what it holds while it measures, and what it says of what it measured."""

import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from adaptiveload.training.config import load_config
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.ema import Ema
from scripts import benchmark_shapes, fit_cost_model


def test_averages_are_held_while_it_measures(
    run_config: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training holds them: a memory model without them was 2.8 GB low for 1.3B on two GPUs."""
    averaged: list[int] = []
    monkeypatch.setattr(Ema, "update", lambda ema, step: averaged.append(len(ema.shadow)))
    output = tmp_path / "scan.parquet"
    arguments = [str(run_config), "--output", str(output), "--points", "1x1x64x64", "--repeats", "1"]
    config = load_config(run_config, [])
    benchmark_shapes.run(benchmark_shapes.parse_arguments(arguments), config, ranks, time.monotonic())
    assert len(averaged) == 1, "one step"
    assert averaged[0] > 0
    assert fit_cost_model.read_provenance(pq.read_table(output))["averages"] is True


def test_a_memory_model_says_that_its_scan_held_no_averages(capsys: pytest.CaptureFixture[str]) -> None:
    batch, length = np.array([1.0, 2, 4, 1, 2, 1]), np.array([256.0, 256, 256, 4096, 4096, 16_384])
    columns = {"batch_size": batch, "seq_len": length, "reserved_bytes": 1e9 + 1e5 * batch * length}
    for provenance, is_said in (({"gpu": "h200"}, True), ({"gpu": "h200", "averages": True}, False), ({}, False)):
        assert fit_cost_model.fit_memory_model(columns, provenance, {}) is not None
        assert ("without averages" in capsys.readouterr().out) == is_said, provenance


def test_recompute_levels_are_told_apart(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    """As of one level, the rows of a point at both would be repeats that spread by a third."""
    rows = [
        {"recompute": level, "batch_size": size, "seq_len": seq_len, "repeat": repeat, "busy_s": factor * seconds}
        for level, factor in (("none", 1.0), ("full", 1.34))
        for size, seq_len, seconds in ((1, 1000, 1.0), (4, 1000, 4.0), (2, 2000, 8.0), (1, 4000, 16.0))
        for repeat in range(3)
    ]
    benchmark_shapes.print_correlation(ranks, rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[::2]] == ["recompute none", "recompute full"]
    assert all(line.endswith("with S^2 1.00") for line in lines[::2]), "of all samples; of one it is 0.96"
    assert all("median 0.00%, most 0.00%" in line for line in lines[1::2])
