"""The figures of one step, from its plan and what every rank measured. Keys are listed in docs/metrics.md."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adaptiveload.scheduling.flops import ModelDims
from adaptiveload.scheduling.metrics import idle_share, load_cv, step_time_cv, straggler
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.training.distributed import Ranks

# Dense bf16 peak in FLOP/s, from the vendor's data sheets, of the first that the device's name contains.
_PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIE": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
}
# Beginnings of the keys whose figures do not depend on how long anything took.
_UNTIMED = (
    "train/",
    "batch/",
    "imbalance/load_cv",
    "imbalance/idle_share_planned",
    "perf/memory_peak_gib",
    "perf/num_compiled",
)


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured in one step.

    Attributes:
        loss_sum: Sum of w_i * l_i over the rank's samples.
        step_s: Wall seconds of the step.
        data_wait_s: Seconds of it spent waiting for DataLoader workers.
        memory_peak_gib: Peak allocated device memory of the step; 0 on CPU.
        num_lost: Samples of the step that the rank could not read.
        busy_s: Busy seconds of each of the rank's micro-batches.
        compile_s: Seconds of the step that went into torch.compile; not in `busy_s`.
        stop_signal: Signal that asked this rank to end, or 0.
        save_is_overdue: Whether a save is due by this rank's clock; only rank 0's counts.
        save_has_failed: Whether this rank knows that a save has failed.
    """

    loss_sum: float
    step_s: float
    data_wait_s: float
    memory_peak_gib: float
    num_lost: int
    busy_s: list[float]
    compile_s: float = 0.0
    stop_signal: int = 0
    save_is_overdue: bool = False
    save_has_failed: bool = False


@dataclass(frozen=True)
class StepMeasurement:
    """Every rank's measurement. Legend: `G` slots, `R` ranks.

    Attributes:
        loss_sum: Sum of w_i * l_i over all samples of the step.
        num_lost: Samples of the step that could not be read.
        step_s, data_wait_s, memory_peak_gib: float64 [R].
        busy_s: float64 [G, R]; 0 where a rank has no such micro-batch.
        compile_s: Seconds that the others waited for the rank that compiled longest; `step_s` is without them.
        stop_signal: Signal that asked any of the ranks to end, or 0; the same on all ranks.
        save_is_overdue: Whether a save is due by rank 0's clock.
        save_has_failed: Whether any of the ranks knows that a save has failed.
    """

    loss_sum: float
    num_lost: int
    step_s: np.ndarray
    data_wait_s: np.ndarray
    memory_peak_gib: np.ndarray
    busy_s: np.ndarray
    compile_s: float = 0.0
    stop_signal: int = 0
    save_is_overdue: bool = False
    save_has_failed: bool = False


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name; None for one that is not known, and for a part of one (MIG)."""
    name = device_name.upper()
    return None if "MIG" in name else next((flops for known, flops in _PEAK_FLOPS.items() if known in name), None)


def gather_measurements(ranks: Ranks, plan: StepPlan, mine: RankMeasurement) -> StepMeasurement:
    """Bring the ranks' measurements of `plan`'s step together; one host collective."""
    busy = mine.busy_s + [0.0] * (plan.num_slots - len(mine.busy_s))
    times = [mine.step_s, mine.data_wait_s, mine.memory_peak_gib, mine.compile_s]
    flags = [mine.stop_signal, mine.save_is_overdue, mine.save_has_failed]
    scalars = [mine.loss_sum, mine.num_lost, *flags, *times]
    rows = ranks.gather(torch.tensor([*scalars, *busy], dtype=torch.float64)).numpy()
    loss_sum, num_lost, stop_signal, overdue, failed, step_s, data_wait_s, memory_peak_gib, compile_s, *_ = rows.T
    return StepMeasurement(
        loss_sum=float(loss_sum.sum()),
        num_lost=int(num_lost.sum()),
        step_s=step_s - compile_s.max(),
        data_wait_s=data_wait_s,
        memory_peak_gib=memory_peak_gib,
        busy_s=rows[:, len(scalars) :].T,
        compile_s=float(compile_s.max()),
        stop_signal=int(stop_signal.max()),
        save_is_overdue=bool(overdue[0]),
        save_has_failed=bool(failed.any()),
    )


def step_metrics(
    plan: StepPlan, measured: StepMeasurement, table: SampleTable, dims: ModelDims | None, device_name: str
) -> dict[str, float]:
    """Figures of one step by metric key; MFU only with `dims` and on a device whose peak is known."""
    step_s = float(measured.step_s.max())
    tokens = int(table.num_tokens[plan.sample_ids].sum())
    busy_by_rank = measured.busy_s.sum(0)
    metrics = {
        "train/loss": measured.loss_sum / plan.normalizer,
        "perf/step_s": step_s,
        "perf/tokens_per_s": tokens / step_s,
        "perf/samples_per_s": plan.num_samples / step_s,
        "perf/data_wait_share": float((measured.data_wait_s / measured.step_s).max()),
        "perf/memory_peak_gib": float(measured.memory_peak_gib.max()),
        "imbalance/load_cv": load_cv(plan.costs_us, plan.meet, plan.replicas),
        "imbalance/measured_cv": load_cv(measured.busy_s, plan.meet, plan.replicas),
        "imbalance/idle_share_planned": idle_share(plan.costs_us, plan.meet, plan.replicas),
        "imbalance/cost_error": cost_error(plan, measured.busy_s),
        "imbalance/step_time_cv": step_time_cv(measured.busy_s),
        "imbalance/slot_time_cv": load_cv(measured.busy_s, "slot", plan.replicas),
        "imbalance/idle_share": idle_share(measured.busy_s, plan.meet, plan.replicas),
        "imbalance/straggler": straggler(measured.busy_s),
        "batch/num_samples": plan.num_samples,
        "batch/num_tokens": tokens,
        "batch/num_slots": plan.num_slots,
    }
    peak = peak_flops(device_name)
    if peak is not None and dims is not None:
        pairs = zip(table.num_tokens[plan.sample_ids], table.text_len[plan.sample_ids], strict=True)
        flops = sum(dims.train_flops(int(tokens), int(text)) for tokens, text in pairs)
        metrics["perf/mfu"] = flops / step_s / len(measured.step_s) / peak
    for rank, seconds in enumerate(zip(busy_by_rank, measured.data_wait_s, measured.step_s, strict=True)):
        for name, value in zip(("busy_s", "data_wait_s", "step_s"), seconds, strict=True):
            metrics[f"rank/{rank:03d}/{name}"] = float(value)
    return metrics


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    """Those of `metrics` that do not depend on how long anything took: what a step under the profiler can tell."""
    return {key: value for key, value in metrics.items() if key.startswith(_UNTIMED)}


def cost_error(plan: StepPlan, busy_s: np.ndarray) -> float:
    """Median over the step's micro-batches of |planned / busy - 1|; fillers are left out."""
    pairs = [
        (plan.costs_us[g, rank] / 1e6, busy_s[g, rank])
        for g, slot in enumerate(plan.slots)
        for rank, members in enumerate(slot)
        if members and busy_s[g, rank] > 0
    ]
    return float(np.median([abs(planned / busy - 1) for planned, busy in pairs])) if pairs else 0.0


def schedule_record(plan: StepPlan, measured: StepMeasurement, table: SampleTable) -> dict[str, Any]:
    """What each rank did in each slot of a step, for the report's picture."""
    slots = [
        [None if indices is None else _shape_counts(plan, indices, table) for indices in row] for row in plan.slots
    ]
    return {
        "step": plan.step,
        "meet": plan.meet,
        "replicas": plan.replicas,
        "shapes": slots,
        "num_tokens": plan.num_tokens.tolist(),
        "costs_us": plan.costs_us.tolist(),
        "busy_s": np.round(measured.busy_s, 6).tolist(),
    }


def _shape_counts(plan: StepPlan, indices: tuple[int, ...], table: SampleTable) -> dict[str, int]:
    counts: dict[str, int] = {}
    for i in indices:
        shape = str(table.shapes[table.shape_ids[plan.sample_ids[i]]])
        counts[shape] = counts.get(shape, 0) + 1
    return counts
