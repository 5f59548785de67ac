"""Training on GPUs: the same run as on CPU in fp32, close to it in bf16, the same on one and two GPUs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.launching import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def rows_of(run_config: Path, name: str, *overrides: str, ranks: int, on_gpu: bool) -> list[dict]:
    launch(run_config, f"name={name}", *overrides, ranks=ranks, on_gpu=on_gpu)
    run_dir = Path(yaml.safe_load(run_config.read_text())["output_dir"]) / name
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def losses(rows: list[dict]) -> np.ndarray:
    assert len(rows) == 20
    return np.array([row["train/loss"] for row in rows])


@pytest.fixture(scope="module")
def on_cpu(run_config: Path) -> np.ndarray:
    return losses(rows_of(run_config, "cpu", ranks=1, on_gpu=False))


def test_fp32_on_gpu_is_the_run_on_cpu(run_config: Path, on_cpu: np.ndarray) -> None:
    rows = rows_of(run_config, "gpu", ranks=1, on_gpu=True)
    # Weights and noise are drawn on the CPU; tf32 is off, and fp32 sums in another order differ by 1e-6 a step.
    np.testing.assert_allclose(losses(rows), on_cpu, rtol=1e-3)
    assert all(row["rank/000/busy_s"] > 0 and row["perf/memory_peak_gib"] > 0 for row in rows)
    assert all(row["rank/000/busy_s"] < row["rank/000/step_s"] for row in rows)


def test_bf16_is_close(run_config: Path, on_cpu: np.ndarray) -> None:
    rows = rows_of(run_config, "bf16", "precision=bf16", ranks=1, on_gpu=True)
    # bf16 rounds to 3 digits; over 20 steps the loss keeps within 2 %.
    np.testing.assert_allclose(losses(rows), on_cpu, rtol=0.02)


@pytest.mark.parametrize("meet", ["slot", "step"])
def test_two_gpus_train_the_same_run(run_config: Path, on_cpu: np.ndarray, meet: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    rows = rows_of(run_config, f"gpus-{meet}", f"schedule.meet={meet}", ranks=2, on_gpu=True)
    np.testing.assert_allclose(losses(rows), on_cpu, rtol=1e-3)


@pytest.mark.parametrize("config", ["mmdit_1_4b", "wan_1_3b"])
def test_each_norm_of_a_step_is_one_launch(config: str) -> None:
    """Of the CUDA kernels, in a profile of a step of the mixed corpus on two GPUs; four blocks of full width."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    overrides = ("model.num_layers=4", "schedule.samples_per_step=16", "optimizer.warmup_steps=0")
    script = "tests/end_to_end/profiled_launches.py"
    result = launch(
        "configs/mixes/mixed.yaml", f"configs/{config}.yaml", *overrides, ranks=2, script=script, on_gpu=True
    )
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        assert row["kernels"] == "cuda"
        assert row["calls"] == row["sites"]
        assert {kind: row["launches"][kind] for kind in ("forward", "backward")} == row["sites"]
        assert row["launches"]["finish"] == row["sites"]["backward"], "column sums of the modulation's gradients"
