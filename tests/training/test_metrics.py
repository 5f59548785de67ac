"""The figures of a step by hand, on a plan of two slots and two ranks."""

from dataclasses import replace

import numpy as np
import pytest

from adaptiveload.scheduling.flops import WAN_1_3B
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry
from adaptiveload.training.metrics import StepMeasurement, peak_flops, schedule_record, step_metrics

TABLE = SampleTable.from_columns(
    np.array(["a", "b", "c"]),
    np.array(["a", "b", "c"]),
    np.array([1, 1, 5]),
    np.array([32, 64, 32]),
    np.array([32, 64, 32]),
    np.array([3, 3, 3]),
    LatentGeometry(),
)
PLAN = StepPlan(
    step=7,
    position=21,
    next_position=24,
    sample_ids=np.array([0, 1, 2]),
    epochs=np.zeros(3, np.int64),
    repeats=np.zeros(3, np.int64),
    weights=np.ones(3),
    slots=(((0,), (1,)), ((2,), ())),
    costs_us=np.array([[100, 300], [200, 200]]),
    num_tokens=np.array([[4, 16], [8, 0]]),
    recompute="none",
    recomputed=np.zeros((2, 2), np.int64),
    normalizer=3.0,
    meet="slot",
)
MEASURED = StepMeasurement(
    loss_sum=4.5,
    num_lost=0,
    step_s=np.array([2.0, 1.9]),
    data_wait_s=np.array([0.2, 0.0]),
    memory_peak_gib=np.array([3.0, 5.0]),
    busy_s=np.array([[0.2, 0.6], [0.5, 0.3]]),
)


def test_step_metrics_by_hand() -> None:
    metrics = step_metrics(PLAN, MEASURED, TABLE, WAN_1_3B, "NVIDIA H200")
    expected = {
        "train/loss": 1.5,
        "perf/step_s": 2.0,
        "perf/tokens_per_s": 28 / 2.0,
        "perf/samples_per_s": 1.5,
        "perf/data_wait_share": 0.1,
        "perf/memory_peak_gib": 5.0,
        "perf/mfu": sum(WAN_1_3B.train_flops(s, 512) for s in (4, 16, 8)) / 2.0 / 2 / 989e12,
        "imbalance/load_cv": (0.5 + 0.0) / 2,  # std/mean of (100, 300) is 100/200
        "imbalance/measured_cv": (0.2 / 0.4 + 0.1 / 0.4) / 2,
        "imbalance/idle_share_planned": 1 - 400 / 500,
        "imbalance/cost_error": 1 - 0.0005,  # planned 100 us for .2 s, 300 for .6, 200 for .5; the filler is left out
        "imbalance/step_time_cv": 0.1 / 0.8,  # ranks busy .7 and .9
        "imbalance/slot_time_cv": (0.2 / 0.4 + 0.1 / 0.4) / 2,
        "imbalance/idle_share": 1 - 0.8 / 1.1,
        "imbalance/straggler": 1,
        "batch/num_samples": 3,
        "batch/num_tokens": 28,
        "batch/num_slots": 2,
        "rank/000/busy_s": 0.7,
        "rank/001/busy_s": 0.9,
        "rank/000/data_wait_s": 0.2,
        "rank/001/data_wait_s": 0.0,
        "rank/000/step_s": 2.0,
        "rank/001/step_s": 1.9,
    }
    assert metrics == pytest.approx(expected)


def test_planned_and_measured_cv_are_of_the_same_meetings() -> None:
    """At meet "step" the totals were held against a plan that counts the last backward on its own."""
    plan, measured = replace(PLAN, meet="step"), replace(MEASURED, busy_s=PLAN.costs_us / 1e3)
    metrics = step_metrics(plan, measured, TABLE, None, "cpu")
    assert metrics["imbalance/measured_cv"] == pytest.approx(metrics["imbalance/load_cv"])
    assert metrics["imbalance/measured_cv"] != pytest.approx(metrics["imbalance/step_time_cv"])


def test_mfu_is_only_given_for_known_devices() -> None:
    assert "perf/mfu" not in step_metrics(PLAN, MEASURED, TABLE, WAN_1_3B, "cpu")


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("h200", 989),
    ],
)
def test_peak_is_that_of_the_very_card(device_name: str, tflops: int) -> None:
    """Those with other clocks once had the peak of the fastest, and too low an MFU."""
    assert peak_flops(device_name) == tflops * 1e12


def test_peak_of_part_of_a_card_is_not_known() -> None:
    assert peak_flops("NVIDIA H200 MIG 3g.71gb") is None


def test_schedule_record_names_shapes_of_each_micro_batch() -> None:
    record = schedule_record(PLAN, MEASURED, TABLE)
    assert record["shapes"] == [[{"1x32x32": 1}, {"1x64x64": 1}], [{"5x32x32": 1}, {}]]
    assert record["busy_s"] == [[0.2, 0.6], [0.5, 0.3]]
