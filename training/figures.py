"""Pictures of a run: its shape mix, what each rank did in each slot, busy seconds, imbalance and loss."""

from collections.abc import Sequence
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

from adaptiveload.scheduling.metrics import where_ranks_meet
from adaptiveload.scheduling.shapes import LatentGeometry, Shape

Record = dict[str, Any]
_COLORS = mpl.colormaps["viridis"]
# Curves that lie on each other can still be told apart.
_STYLES = ("-", "--", "-.", ":")
# A page shows no more columns than this; a longer run's columns are means of several steps.
_MOST_COLUMNS = 400


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

    Where ranks meet in every slot, a slot ends for all when its slowest rank is done; where they meet once a step,
    the step does.
    """
    figure, (planned, measured) = plt.subplots(
        2, 1, figsize=(12, 1.2 + 0.55 * 2 * _num_ranks(records)), layout="constrained"
    )
    lengths = [length for record in records for length in _tokens_per_sample(record).values()]
    norm = LogNorm(max(min(lengths), 1), max(lengths) + 1)
    _draw_timeline(planned, records, "costs_us", 1e-6, norm)
    _draw_timeline(measured, records, "busy_s", 1.0, norm)
    planned.set_title(
        f"Planned: steps {records[0]['step']} to {records[-1]['step']}, ranks meet every {records[0]['meet']}"
    )
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


def _draw_timeline(axes: Axes, records: Sequence[Record], field: str, unit_s: float, norm: LogNorm) -> None:
    start, num_ranks = 0.0, _num_ranks(records)
    for record in records:
        durations = np.asarray(record[field], dtype=float) * unit_s  # [G, R]
        meetings = durations[:, None] if record["meet"] == "slot" else durations[None]  # [meetings, slots, R]
        # Groups with a copy of the model each meet among themselves in every slot, with the others at the end.
        num_groups = record.get("replicas", 1) if record["meet"] == "slot" else 1
        groups = np.split(np.arange(num_ranks), num_groups)
        step_end = start + max(sum(slots[:, ranks].sum(0).max() for slots in meetings) for ranks in groups)
        for ranks in groups:
            begin, lengths, g = start, _tokens_per_sample(record), 0
            for number, slots in enumerate(meetings, 1):
                end = step_end if number == len(meetings) else begin + slots[:, ranks].sum(0).max()
                axes.barh(ranks, end - begin, left=begin, height=0.8, color="#d9d9d9", edgecolor="white", linewidth=0.3)
                left = np.full(num_ranks, begin)
                for row in slots:
                    for r in ranks:
                        color = _COLORS(norm(lengths[g, r])) if (g, r) in lengths else "white"
                        axes.barh(r, row[r], left=left[r], height=0.8, color=color, edgecolor="white", linewidth=0.5)
                        _label_bar(axes, record, g, r, left[r], row[r])
                    left, g = left + row, g + 1
                begin = end
        start = step_end
        axes.axvline(start, color="black", linewidth=1)
    axes.set_yticks(range(num_ranks), [f"rank {r}" for r in range(num_ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, start)


def _label_bar(axes: Axes, record: Record, g: int, r: int, left: float, width: float) -> None:
    shapes = record["shapes"][g][r]
    if shapes and len(record["shapes"]) * _num_ranks([record]) <= 64:
        axes.text(left + width / 2, r, str(sum(shapes.values())), ha="center", va="center", fontsize=7, color="white")


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
        rows: With `meet` and `steps`, of which each has `busy_s` [G, R] and its wall seconds `step_s`. What a step
            takes beyond its meetings (collectives, optimizer) is left white.
        titles: One a row.
    """
    num_ranks = [len(row["steps"][0]["busy_s"][0]) for row in rows]
    figure, all_axes = plt.subplots(
        len(rows), 1, figsize=(12, 0.6 + sum(0.75 + 0.25 * num for num in num_ranks)), sharex=True, squeeze=False,
        layout="constrained", gridspec_kw={"height_ratios": [0.75 + 0.25 * num for num in num_ranks]},
    )  # fmt: skip
    for axes, row, title, num in zip(all_axes[:, 0], rows, titles, num_ranks, strict=True):
        start = 0.0
        for step in row["steps"]:
            left = start
            for busy in where_ranks_meet(step["busy_s"], row["meet"]):
                axes.barh(range(num), busy.max(), left=left, height=0.8, color="#e3b5a4")
                axes.barh(range(num), busy, left=left, height=0.8, color="#3d6b8f")
                left += busy.max()
            start += max(step["step_s"], left - start)
            axes.axvline(start, color="black", linewidth=0.6)
        axes.set_yticks(range(num), [f"rank {rank}" for rank in range(num)], fontsize=7)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9, loc="left")
    all_axes[-1, 0].set_xlabel("seconds; dark: a rank works, light: it waits for the others")
    all_axes[-1, 0].set_xlim(left=0)
    return figure


def imbalance_figure(metrics: Sequence[Record]) -> Figure:
    """Planned and measured CV, and idle share, over the steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.2), layout="constrained")
    _draw_curve(left, metrics, "imbalance/load_cv", "load CV, planned", "#9bb7d4")
    _draw_curve(left, metrics, "imbalance/step_time_cv", "step-time CV, measured", "#d1603d")
    _draw_curve(right, metrics, "imbalance/idle_share_planned", "planned", "#9bb7d4")
    _draw_curve(right, metrics, "imbalance/idle_share", "measured", "#d1603d")
    left.set_title("Imbalance of ranks (std / mean)")
    right.set_title("Idle share")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
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
