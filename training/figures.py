"""Pictures of a run: its shape mix, what each rank did in each slot, busy seconds, imbalance and loss."""

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from adaptiveload.scheduling.metrics import last_of_each_rank, step_time, where_ranks_meet
from adaptiveload.scheduling.shapes import LatentGeometry, Shape

Record = dict[str, Any]
_COLORS = mpl.colormaps["viridis"]
# Curves that lie on each other can still be told apart.
_STYLES = ("-", "--", "-.", ":")
# A page shows no more columns than this; a longer run's columns are means of several steps.
_MOST_COLUMNS = 400
MOST_NAMED_RANKS = 32  # with more, a picture of the ranks does not grow any more


def shape_mix_figure(counts: dict[Shape, int], geometry: LatentGeometry) -> Figure:
    """Share of samples and of tokens by shape, shapes in order of tokens."""
    shapes = sorted(counts, key=geometry.num_tokens)
    samples = np.array([counts[shape] for shape in shapes], dtype=float)
    tokens = samples * [geometry.num_tokens(shape) for shape in shapes]
    figure, axes = plt.subplots(figsize=(10, 0.24 * len(shapes) + 1.2), layout="constrained")
    rows = np.arange(len(shapes))
    axes.barh(rows - 0.2, samples / samples.sum() * 100, height=0.4, label="samples", color="#9bb7d4")
    axes.barh(rows + 0.2, tokens / tokens.sum() * 100, height=0.4, label="tokens", color="#d1603d")
    axes.set_yticks(rows, [f"{shape}  ({geometry.num_tokens(shape)} tokens)" for shape in shapes], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("share, %")
    axes.set_title("Shape mix: frames x height x width")
    axes.legend(loc="lower right")
    return figure


def schedule_figure(records: Sequence[Record]) -> Figure:
    """Timeline of ranks over some steps: above as planned, below as measured; grey is waiting for other ranks.

    Ranks wait where they meet (`where_ranks_meet`): at the end of every slot, or at the begin and the end of the
    backward of their last micro-batches, which is hatched then.
    """
    num_ranks = _num_ranks(records)
    figure, (planned, measured) = plt.subplots(
        2, 1, figsize=(12, 1.2 + 0.55 * 2 * min(num_ranks, MOST_NAMED_RANKS)), layout="constrained"
    )
    lengths = [length for record in records for length in _tokens_per_sample(record).values()]
    norm = LogNorm(max(min(lengths), 1), max(lengths) + 1)
    _draw_timeline(planned, records, "costs_us", 1e-6, norm)
    _draw_timeline(measured, records, "busy_s", 1.0, norm)
    where = "in the backward (hatched) of their last micro-batches"
    if records[0]["meet"] == "slot":
        num_groups = records[0].get("replicas", 1)
        where = "in every slot" + f" within {num_groups} groups, which meet at the end of the step" * (num_groups > 1)
    planned.set_title(f"Planned: steps {records[0]['step']} to {records[-1]['step']}, ranks meet {where}")
    measured.set_title("Measured: busy seconds of each micro-batch, waiting left out of them")
    measured.set_xlabel("seconds; a bar is a micro-batch, its colour the mean tokens of its samples, n its samples")
    figure.colorbar(ScalarMappable(norm, _COLORS), ax=[planned, measured], label="tokens per sample", pad=0.01)
    return figure


def _num_ranks(records: Sequence[Record]) -> int:
    return len(records[0]["costs_us"][0])


def _tokens_per_sample(record: Record) -> dict[tuple[int, int], float]:
    lengths = {}
    for g, row in enumerate(record["shapes"]):
        for r, shapes in enumerate(row):
            if shapes:
                lengths[g, r] = record["num_tokens"][g][r] / sum(shapes.values())
    return lengths


def stretches(costs: np.ndarray, meet: str, replicas: int = 1) -> Iterator[tuple[np.ndarray, float, float, np.ndarray]]:
    """A step from meeting to meeting: ranks that meet, begin and end, and their parts of each micro-batch in between.

    Times count from the step's start. Groups with a copy of the model each wait for each other at the end of the step.

    Args:
        costs: [G, R], in seconds.
        meet: As in `where_ranks_meet`.
        replicas: Groups of consecutive ranks that meet in slots among themselves.
    """
    for ranks in np.split(np.arange(costs.shape[1]), replicas if meet == "slot" else 1):
        parts = _parts(costs[:, ranks], meet)  # [meetings, G, ranks]
        ends = parts.sum(axis=1).max(axis=1).cumsum()
        ends[-1] = step_time(costs, meet, replicas)
        for begin, end, part in zip([0.0, *ends[:-1]], ends, parts, strict=True):
            yield ranks, begin, end, part


def _parts(costs: np.ndarray, meet: str) -> np.ndarray:
    """What of each micro-batch lies before each meeting, [meetings, G, R]; summed over G it is `where_ranks_meet`."""
    if meet == "slot":
        return costs * np.eye(len(costs))[:, :, None]
    is_last = np.arange(len(costs))[:, None] == last_of_each_rank(costs)
    backward = np.where(is_last, where_ranks_meet(costs, meet)[1], 0)
    return np.stack([costs - backward, backward])


def _draw_timeline(axes: Axes, records: Sequence[Record], field: str, unit_s: float, norm: LogNorm) -> None:
    start, num_ranks = 0.0, _num_ranks(records)
    for record in records:
        costs = np.asarray(record[field], dtype=float) * unit_s  # [G, R]
        meet, replicas, lengths = record["meet"], record.get("replicas", 1), _tokens_per_sample(record)
        for ranks, begin, end, part in stretches(costs, meet, replicas):
            axes.barh(ranks, end - begin, left=start + begin, height=0.8, color="#d9d9d9", linewidth=0)
            left = np.full(len(ranks), start + begin)
            is_backward = meet == "step" and begin > 0
            for g in np.flatnonzero(part.any(axis=1)):
                colors = [_COLORS(norm(lengths[g, r])) if (g, r) in lengths else (1.0,) * 4 for r in ranks]
                axes.barh(
                    ranks, part[g], left=left, height=0.8, color=colors,
                    edgecolor=(1, 1, 1, 0.5), linewidth=0.5, hatch="//" if is_backward else None,
                )  # fmt: skip
                for r, at, width, color in zip(ranks, left, part[g], colors, strict=True):
                    if 2 * width > costs[g, r]:  # of a micro-batch in two parts the longer
                        _label_bar(axes, record, (g, r), at + width / 2, "black" if sum(color[:3]) > 1.6 else "white")
                left = left + part[g]
        start += step_time(costs, meet, replicas)
        axes.axvline(start, color="black", linewidth=1)
    if num_ranks <= MOST_NAMED_RANKS:
        axes.set_yticks(range(num_ranks), [f"rank {r}" for r in range(num_ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, start)


def _label_bar(axes: Axes, record: Record, micro_batch: tuple[int, int], x: float, color: str) -> None:
    g, r = micro_batch
    shapes = record["shapes"][g][r]
    if shapes and len(record["shapes"]) * _num_ranks([record]) <= 64:
        axes.text(x, r, str(sum(shapes.values())), ha="center", va="center", fontsize=7, color=color)


def busy_figure(steps: Sequence[int], busy_s: np.ndarray) -> Figure:
    """Heat maps, rank by step: busy seconds, and how far each rank lies from the step's mean.

    Above, a dear step is a bright column; below, a rank that is always late is a red row.

    Args:
        steps: Numbers of the steps, ascending.
        busy_s: Busy seconds, float [steps, R]; NaN where a step had no such rank.
    """
    width = -(-len(steps) // _MOST_COLUMNS)  # entries in one column
    apart = int(np.median(np.diff(steps))) if len(steps) > 1 else 1  # many ranks have no figures at every step
    columns = np.arange(0, len(steps), width)
    counts = np.add.reduceat(np.isfinite(busy_s), columns)
    known = np.where(np.isfinite(busy_s), busy_s, 0)
    num_ranks = np.isfinite(busy_s).sum(1, keepdims=True)
    mean = known.sum(1, keepdims=True) / np.maximum(num_ranks, 1)
    offset = np.where(np.isfinite(busy_s) & (mean > 0), busy_s / np.where(mean > 0, mean, 1) - 1, 0)
    seconds, percent = (
        np.where(counts > 0, np.add.reduceat(values, columns) / np.maximum(counts, 1), np.nan).T  # [R, columns]
        for values in (known, offset * 100)
    )
    height = 1.6 + 2 * min(max(0.22 * len(seconds), 0.9), 5)
    figure, (above, below) = plt.subplots(2, 1, figsize=(12, height), sharex=True, layout="constrained")
    # The ends of the scales leave out the odd step, such as a first one that warms up.
    top = float(np.nanpercentile(seconds, 99))
    far = max(float(np.nanpercentile(np.abs(percent), 99)), 1.0)
    edges = np.append(np.asarray(steps)[columns], steps[-1] + apart) - apart / 2
    for axes, image, colors, low, high, label in (
        (above, seconds, "viridis", 0.0, top, "seconds"),
        (below, percent, "RdBu_r", -far, far, "%"),
    ):
        axes.set_facecolor("#d9d9d9")
        rows = np.arange(len(seconds) + 1) - 0.5
        drawn = axes.pcolormesh(edges, rows, image, cmap=colors, vmin=low, vmax=high)
        axes.invert_yaxis()
        figure.colorbar(drawn, ax=axes, label=label, pad=0.01, extend="max" if low == 0 else "both")
        axes.set_ylabel("rank")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    above.set_title("Busy seconds of each rank in each step")
    below.set_title("The same against the mean of the step's ranks: red is late, blue is early")
    below.set_xlabel("step" if width == 1 else f"step; a column is the mean of {width} steps that have figures by rank")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def policies_figure(rows: Sequence[Record], titles: Sequence[str]) -> Figure:
    """Busy seconds by rank over the steps of each row, waiting shaded; a line ends a step.

    Args:
        rows: With `meet`, `replicas` and `steps`, of which each has `busy_s` [G, R] and its wall seconds `step_s`. What
            a step takes beyond its meetings (collectives, optimizer) is left white.
        titles: One a row.
    """
    num_ranks = [len(row["steps"][0]["busy_s"][0]) for row in rows]
    heights = [0.75 + 0.25 * min(num, MOST_NAMED_RANKS) for num in num_ranks]
    figure, all_axes = plt.subplots(
        len(rows), 1, figsize=(12, 0.6 + sum(heights)), sharex=True, squeeze=False,
        layout="constrained", gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axes, row, title, num in zip(all_axes[:, 0], rows, titles, num_ranks, strict=True):
        start = 0.0
        for step in row["steps"]:
            busy_s = np.asarray(step["busy_s"], dtype=float)
            for ranks, begin, end, part in stretches(busy_s, row["meet"], row["replicas"]):
                axes.barh(ranks, end - begin, left=start + begin, height=0.8, color="#e3b5a4")
                axes.barh(ranks, part.sum(axis=0), left=start + begin, height=0.8, color="#3d6b8f")
            start += max(step["step_s"], step_time(busy_s, row["meet"], row["replicas"]))
            axes.axvline(start, color="black", linewidth=0.6)
        if num <= MOST_NAMED_RANKS:
            axes.set_yticks(range(num), [f"rank {rank}" for rank in range(num)], fontsize=7)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9, loc="left")
    all_axes[-1, 0].set_xlabel("seconds; dark: a rank works, light: it waits for the others")
    all_axes[-1, 0].set_xlim(left=0)
    return figure


def imbalance_figure(metrics: Sequence[Record]) -> Figure:
    """Over the steps: load CV and idle share, planned and measured, and the CV of the measured totals.

    Metrics of runs from before `imbalance/measured_cv` leave that curve out.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 3.2), layout="constrained")
    _draw_curve(left, metrics, "imbalance/load_cv", "planned", "#9bb7d4")
    _draw_curve(left, metrics, "imbalance/measured_cv", "measured", "#d1603d")
    _draw_curve(middle, metrics, "imbalance/step_time_cv", "measured", "#d1603d")
    _draw_curve(right, metrics, "imbalance/idle_share_planned", "planned", "#9bb7d4")
    _draw_curve(right, metrics, "imbalance/idle_share", "measured", "#d1603d")
    left.set_title("Load CV: std / mean where ranks meet")
    middle.set_title("Step-time CV: std / mean of the step's totals")
    right.set_title("Idle share")
    for axes in (left, middle, right):
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        if axes.lines:
            axes.legend()
    return figure


def loss_figure(metrics: Sequence[Record]) -> Figure:
    """Training loss, held-out loss, and the linear predictor to beat."""
    figure, axes = plt.subplots(figsize=(12, 3.2), layout="constrained")
    _draw_curve(axes, metrics, "train/loss", "training", "#9bb7d4")
    held_out = [
        (row["step"], row["train/loss_heldout"]) for row in metrics if row.get("train/loss_heldout") is not None
    ]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#d1603d", label="held out, averaged weights")
    linear = [row["train/loss_heldout_linear"] for row in metrics if row.get("train/loss_heldout_linear") is not None]
    if linear:
        axes.axhline(linear[-1], color="black", linestyle="--", label="best per-channel linear predictor")
    axes.set_xlabel("step")
    axes.set_title("Loss")
    axes.legend()
    return figure


def loss_curves_figure(steps: np.ndarray, curves: dict[str, np.ndarray], window: int, title: str) -> Figure:
    """Losses of several runs, means over `window` steps in bold, and their difference to the first run's below."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, layout="constrained", gridspec_kw={"height_ratios": [3, 2]}
    )
    first = next(iter(curves.values()))
    for number, (name, losses) in enumerate(curves.items()):
        color = mpl.colormaps["tab10"](number)
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        above.plot(steps, losses, color=color, alpha=0.25, linewidth=1)
        above.plot(steps[window - 1 :], smooth, color=color, linewidth=2, linestyle=_STYLES[number % 4], label=name)
        below.plot(steps, (losses / first - 1) * 100, color=color, linewidth=1, linestyle=_STYLES[number % 4])
    above.set_title(f"{title} (bold: mean of {window} steps)")
    above.legend()
    below.set_ylabel("difference to the first, %")
    below.set_xlabel("step")
    return figure


def _draw_curve(axes: Axes, metrics: Sequence[Record], key: str, label: str, color: str) -> None:
    points = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
    if not points:
        return
    steps, values = np.array(points).T
    axes.plot(steps, values, color=color, alpha=0.35, linewidth=1)
    window = max(len(values) // 30, 1)
    if len(values) >= window > 1:
        smooth = np.convolve(values, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], smooth, color=color, linewidth=2, label=f"{label} (mean of {window})")
    else:
        axes.plot(steps, values, color=color, label=label)
