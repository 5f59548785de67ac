"""Pictures of scheduling before a run: fitted laws against measurements, and simulated policies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from adaptiveload.scheduling.cost import PowerCost, TwoTermCost
from adaptiveload.scheduling.fit import Points, relative_errors
from adaptiveload.training.figures import stretches

_COLORS = {"equal_token": "#b0b0b0", "dual_constraint": "#9bb7d4", "balanced": "#d1603d"}
_LAW_COLORS = {"two terms": "#d1603d", "power law": "#9bb7d4"}


def fit_figure(points: Points, two_term: TwoTermCost, power: PowerCost) -> Figure:
    """Left: fitted over measured seconds. Middle: relative residuals by length. Right: both laws at one sample."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for name, law in (("two terms", two_term), ("power law", power)):
        errors = relative_errors(points, law)
        color = _LAW_COLORS[name]
        left.loglog(points.seconds, points.seconds * (1 + errors), "o", color=color, label=name, markersize=4)
        middle.semilogx(points.seq_len, errors * 100, "o", color=color, markersize=4, label=name)
        lengths = np.geomspace(points.seq_len.min(), points.seq_len.max(), 200).astype(np.int64)
        right.loglog(lengths, law.micro_batch_us(law.sample_us(lengths, lengths)) / 1e6, color=color, label=name)
    span = [points.seconds.min(), points.seconds.max()]
    left.plot(span, span, color="black", linewidth=0.8)
    left.set(title="Fitted against measured", xlabel="measured busy seconds", ylabel="fitted")
    middle.axhline(0, color="black", linewidth=0.8)
    middle.set(title="Residuals", xlabel="tokens of a sample", ylabel="fitted / measured - 1, %")
    single = points.batch_size == 1
    right.loglog(points.seq_len[single], points.seconds[single], "ko", markersize=4, label="measured")
    right.set(title="One sample a micro-batch", xlabel="tokens", ylabel="seconds")
    for axes in (left, middle, right):
        axes.legend()
    return figure


def write_simulation_figures(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw simulated rows: slots by rank for each policy, and CV against world size; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in (("slots_by_rank.png", slots_figure(rows)), ("cv_by_world_size.png", scaling_figure(rows))):
        figure.savefig(folder / name, dpi=110)
        plt.close(figure)
        paths.append(folder / name)
    return paths


def slots_figure(rows: Sequence[dict[str, Any]], max_ranks: int = 16) -> Figure:
    """One step of each policy on the smallest world size: a bar is a micro-batch, grey is waiting."""
    first = rows[0]
    keys = ("meet", "world_size", "memory_limit_tokens")
    same = [row for row in rows if all(row[key] == first[key] for key in keys)]
    figure, panels = plt.subplots(
        len(same), 1, figsize=(12, 0.8 + 1.9 * len(same)), layout="constrained", squeeze=False
    )
    for axes, row in zip(panels[:, 0], same, strict=True):
        times = np.asarray(row["slots_us"], float) / 1e6  # [G, R]
        _draw_slots(axes, times, row["meet"], min(max_ranks, times.shape[1]))
        axes.set_title(f"{row['policy']}: idle {row['idle_share']:.3f}, load CV {row['load_cv']:.3f}", fontsize=10)
        axes.set_ylabel("rank")
    panels[-1, 0].set_xlabel("planned seconds of one step")
    return figure


def _draw_slots(axes: Axes, times: np.ndarray, meet: str, num_shown: int) -> None:
    for _, begin, end, part in stretches(times, meet):
        axes.barh(range(num_shown), end - begin, left=begin, height=0.85, color="#d9d9d9", linewidth=0)
        left = np.full(num_shown, begin)
        for g, row in enumerate(part[:, :num_shown]):
            if row.any():
                color = f"C{g % 10}"
                axes.barh(range(num_shown), row, left=left, height=0.85, color=color, edgecolor="white", linewidth=0.4)
            left = left + row
    axes.invert_yaxis()


def scaling_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """Load CV and idle share of each policy against world size; a line is a memory limit and a meeting scope."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.8), layout="constrained")
    kinds = sorted({(row["policy"], row["memory_limit_tokens"], row["meet"]) for row in rows})
    limits = sorted({row["memory_limit_tokens"] for row in rows})
    for kind in kinds:
        policy, limit, meet = kind
        chosen = [row for row in rows if (row["policy"], row["memory_limit_tokens"], row["meet"]) == kind]
        chosen.sort(key=lambda row: row["world_size"])
        style = ("-" if meet == "slot" else "--") + "os^v"[limits.index(limit) % 4]
        for axes, key in ((left, "load_cv"), (right, "idle_share")):
            points = [row["world_size"] for row in chosen], [row[key] for row in chosen]
            axes.plot(*points, style, color=_COLORS[policy], label=f"{policy}, {limit}, {meet}")
    for axes, title in ((left, "Load CV where ranks meet"), (right, "Idle share")):
        axes.set_xscale("log", base=2)
        axes.set(title=title, xlabel="ranks", ylim=(0, None))
    right.legend(fontsize=7)
    return figure
