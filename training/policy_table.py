"""Figures of measured steps of scheduling policies, and the table that holds them side by side.

Tokens/s of a few steps say what was drawn as much as how fast it ran. So every row also has its useful share, which
prices samples by one law for all rows of a model, its kernels and its recompute setting (`scheduling/useful_work.py`),
and the tokens/s that this share gives on the mix itself. A law is fitted per such arm, because these change what a
token costs; within an arm the policies share it, so that one that recomputes more or packs worse shows it as a lower
share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptiveload.scheduling.metrics import load_cv, step_time, step_time_cv, where_ranks_meet
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.recompute import ALL_BLOCKS
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.useful_work import fit_work, power_sums, rate_on_mix, useful_share
from adaptiveload.training.metrics import StepMeasurement, cost_error

Row = dict[str, Any]
ARM = ("model", "kernels", "recompute")  # rows that agree in these share a law of work
NAMES = ("model", "policy", "kernels", "recompute", "meet")
MAIN = (
    ("tokens/s on the mix", "tokens_per_s_on_mix", ",.0f"),
    ("relative", "relative", ".3f"),
    ("useful share", "useful_share", ".3f"),
    ("MFU on the mix", "mfu_on_mix", ".3f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("5th percentile", "tokens_per_s_step_p5", ",.0f"),
    ("minimum", "tokens_per_s_step_min", ",.0f"),
    ("samples/s", "samples_per_s", ".2f"),
    ("load CV", "load_cv", ".4f"),
    ("step-time CV", "step_time_cv", ".4f"),
    ("idle share", "idle_share", ".4f"),
    ("peak GiB", "memory_peak_gib", ".1f"),
    ("mean peak GiB", "memory_mean_gib", ".1f"),
    ("of the GPU", "memory_share", ".3f"),
    ("of the token limit", "token_limit_share", ".3f"),
    ("R with tokens", "pearson_tokens", ".3f"),
    ("R with S^2", "pearson_squares", ".3f"),
)
MORE = (
    ("steps", "num_steps", "d"),
    ("samples a step", "samples_per_step", ".1f"),
    ("slots a step", "slots_per_step", ".1f"),
    ("mean tokens a sample", "tokens_per_sample", ",.0f"),
    ("seconds a step", "step_s", ".3f"),
    ("tokens/s planned", "tokens_per_s_planned", ",.0f"),
    ("step-time CV planned", "step_time_cv_planned", ".4f"),
    ("idle share planned", "idle_share_planned", ".4f"),
    ("CV where ranks meet", "measured_cv", ".4f"),
    ("slot CV", "slot_time_cv", ".4f"),
    ("blocks recomputed", "recomputed_share", ".2f"),
    ("cost error", "cost_error", ".3f"),
    ("work law's error", "work_law_error", ".3f"),
)


@dataclass(frozen=True)
class Mix:
    """What rows are rated on.

    Attributes:
        num_tokens: int64 [samples], tokens of each sample of the mix.
        seq_lens: int64 [samples], lengths that they are priced by.
        flops: Mean model FLOPs of a sample, forward and backward; None where the device's peak is unknown.
        peak_flops: Of one device, per second.
    """

    num_tokens: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    flops: float | None
    peak_flops: float | None


def summarize(
    plans: Sequence[StepPlan],
    measurements: Sequence[StepMeasurement],
    warmup: int,
    table: SampleTable,
    token_limit: int,
    text_tokens: int,
    device_bytes: int,
) -> Row:
    """Figures of the steps after the warm-up; cost errors of all of them, in order.

    Args:
        plans: Plans that ran.
        measurements: What the ranks measured in each.
        warmup: First steps that do not count.
        table: Samples.
        token_limit: Most tokens of a micro-batch.
        text_tokens: What the limit counts for each sample's text.
        device_bytes: Memory of one device.
    """
    all_pairs = list(zip(plans, measurements, strict=True))
    errors, pairs = [cost_error(plan, measured.busy_s) for plan, measured in all_pairs], all_pairs[warmup:]
    counted, meet, replicas = [plan for plan, _ in pairs], plans[0].meet, plans[0].replicas
    costs_us, busy_s = [plan.costs_us for plan in counted], [measured.busy_s for _, measured in pairs]
    step_s = np.array([measured.step_s.max() for _, measured in pairs])
    tokens = np.array([int(plan.num_tokens.sum()) for plan in counted])
    samples, peaks = sum(p.num_samples for p in counted), np.array([each.memory_peak_gib for _, each in pairs])
    steps = [_step_record(plan, measured, table) for plan, measured in pairs]
    sums, seconds = micro_batches_of(steps)
    return {
        "num_steps": len(counted),
        "meet": meet,
        "replicas": replicas,
        "load_cv": _load_cv(costs_us, meet, replicas),
        "measured_cv": _load_cv(busy_s, meet, replicas),
        "step_time_cv": float(np.mean([step_time_cv(seconds) for seconds in busy_s])),
        "slot_time_cv": float(np.mean([load_cv(seconds, "slot", replicas) for seconds in busy_s])),
        "step_time_cv_planned": float(np.mean([step_time_cv(costs) for costs in costs_us])),
        "tokens_per_s_planned": float(tokens.sum() / sum(step_time(p.costs_us, meet, replicas) for p in counted) * 1e6),
        "idle_share_planned": _idle_share(costs_us, meet, replicas),
        "idle_share": _idle_share(busy_s, meet, replicas),
        "tokens_per_s": float(tokens.sum() / step_s.sum()),
        "tokens_per_s_step_p5": float(np.percentile(tokens / step_s, 5)),
        "tokens_per_s_step_min": float((tokens / step_s).min()),
        "samples_per_s": samples / float(step_s.sum()),
        "samples_per_step": samples / len(counted),
        "slots_per_step": float(np.mean([plan.num_slots for plan in counted])),
        "tokens_per_sample": float(tokens.sum() / samples),
        "step_s": float(step_s.mean()),
        "recomputed_share": sum(int((p.recomputed * p.num_tokens).sum()) for p in counted) / ALL_BLOCKS / tokens.sum(),
        "cost_error": float(np.median(errors[warmup:])),
        "cost_error_by_step": [round(error, 4) for error in errors],
        "memory_peak_gib": float(peaks.max()),
        "memory_mean_gib": float(peaks.mean()),
        "memory_share": float(peaks.mean()) * 2**30 / device_bytes,
        "token_limit_share": float(np.mean([fullest_of(plan, table, text_tokens) for plan in counted])) / token_limit,
        "pearson_tokens": _pearson(sums[:, 1], seconds),
        "pearson_squares": _pearson(sums[:, 2], seconds),
        "steps": steps,
    }


def fullest_of(plan: StepPlan, table: SampleTable, text_tokens: int) -> NDArray[np.int64]:
    """Tokens of each rank's fullest micro-batch as the memory limit counts them, int64 [ranks]."""
    tokens = table.computed_tokens(plan.sample_ids) + text_tokens
    return np.array(
        [max(int(tokens[list(batch)].sum()) for batch in plan.micro_batches(r)) for r in range(plan.costs_us.shape[1])]
    )


def _load_cv(steps: Sequence[NDArray[Any]], meet: str, replicas: int) -> float:
    """CV where ranks meet, averaged over the meetings of all steps; each is [G, R]."""
    return load_cv(np.concatenate([where_ranks_meet(costs, meet, replicas) for costs in steps]), "slot")


def _idle_share(steps: Sequence[NDArray[Any]], meet: str, replicas: int) -> float:
    """Idle share of steps together; each is [G, R]."""
    walls = sum(step_time(costs, meet, replicas) for costs in steps)
    return 1 - float(sum(costs.sum() for costs in steps)) / steps[0].shape[1] / walls if walls else 0.0


def _step_record(plan: StepPlan, measured: StepMeasurement, table: SampleTable) -> Row:
    lengths = table.computed_tokens(plan.sample_ids)
    flat = [lengths[list(batch or ())] for slot in plan.slots for batch in slot]
    return {
        "costs_us": plan.costs_us.tolist(),
        "busy_s": np.round(measured.busy_s, 6).tolist(),
        "step_s": round(float(measured.step_s.max()), 6),
        "recomputed": plan.recomputed.tolist(),  # thousandths of the blocks
        "sums": power_sums(flat).reshape(*plan.costs_us.shape, 3).tolist(),  # [G, R]: samples, tokens, tokens squared
        "seq_lens": np.sort(lengths).tolist(),
    }


def micro_batches_of(steps: Sequence[Row]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Power sums [n, 3] and busy seconds [n] of the micro-batches of `steps` that held samples."""
    sums = np.concatenate([np.array(step["sums"], np.float64).reshape(-1, 3) for step in steps])
    seconds = np.concatenate([np.array(step["busy_s"], np.float64).reshape(-1) for step in steps])
    held = (sums[:, 0] > 0) & (seconds > 0)
    return sums[held], seconds[held]


def _pearson(values: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    """Correlation; NaN where one of both does not vary."""
    if len(values) < 2 or not values.std() or not seconds.std():
        return float("nan")
    return float(np.corrcoef(values, seconds)[0, 1])


def rate_rows(rows: Sequence[Row], mix: Mix, ranks: int) -> None:
    """Fill in what needs all rows: useful share, tokens/s and MFU on the mix, and each beside the first row."""
    arms = {tuple(row[key] for key in ARM) for row in rows}
    for arm in arms:
        members = [row for row in rows if tuple(row[key] for key in ARM) == arm]
        law = fit_work(*micro_batches_of([step for row in members for step in row["steps"]]))
        for row in members:
            lengths = np.concatenate([step["seq_lens"] for step in row["steps"]])
            share = useful_share(law, lengths, sum(step["step_s"] for step in row["steps"]), ranks)
            rate = rate_on_mix(law, share, mix.num_tokens, mix.seq_lens, ranks)
            row |= {"useful_share": share, "tokens_per_s_on_mix": rate}
            row |= {"work_law": vars(law), "work_law_error": law.error, "mfu_on_mix": float("nan")}
            if mix.flops is not None and mix.peak_flops is not None:
                samples_per_s = rate / float(mix.num_tokens.mean())
                row["mfu_on_mix"] = samples_per_s * mix.flops / ranks / mix.peak_flops
    for row in rows:
        row["relative"] = row["tokens_per_s_on_mix"] / rows[0]["tokens_per_s_on_mix"]


def title_of(row: Row) -> str:
    """A row by what tells it from the others."""
    return ", ".join(str(row[name]) for name in NAMES)


def markdown(head: str, rows: Sequence[Row]) -> str:
    """The heading, a table of what matters, and one of the rest."""
    return "\n\n".join([head, *(_table(rows, columns) for columns in (MAIN, MORE))]) + "\n"


def notes(rows: Sequence[Row], *, same_samples: bool) -> str:
    """What a reader of the tables must know beside them, a paragraph each: prices, and what does not compare."""
    lines = [f"Priced by {source}." for source in dict.fromkeys(row["cost"] for row in rows)]
    if cut := [title_of(row) for row in rows if same_samples and not row["is_complete"]]:
        lines.append(f"Cut by the budget, so not of the same samples: {'; '.join(cut)}.")
    counts = [row["samples_per_step"] for row in rows]
    if max(counts) > 1.05 * min(counts):
        lines.append("Samples a step differ: a larger step levels better and pays less for optimizer and gathers.")
    return "".join(f"\n{line}\n" for line in lines)


def _table(rows: Sequence[Row], columns: Sequence[tuple[str, str, str]]) -> str:
    names = [name for name in NAMES if name == "policy" or len({row[name] for row in rows}) > 1]
    lines = ["| " + " | ".join([*names, *(title for title, _, _ in columns)]) + " |"]
    lines.append("|---" * (len(names) + len(columns)) + "|")
    for row in rows:
        cells = [*(str(row[name]) for name in names), *(format(row[key], form) for _, key, form in columns)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
