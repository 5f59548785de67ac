"""Pictures of where ranks wait show the idle share that is printed beside them."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from adaptiveload.scheduling.metrics import idle_share, step_time
from adaptiveload.training.figures import imbalance_figure, policies_figure, schedule_figure
from adaptiveload.training.schedule_figures import slots_figure

# Seconds, [G, R]: a rank that ends earlier than others, and one without work in the middle.
COSTS = np.array([[8.0, 3, 5, 6], [1, 2, 0, 4], [3, 1, 2, 0]])
MEETINGS = (("slot", 1), ("slot", 2), ("slot", 4), ("step", 1), ("step", 2))


def timeline(meet: str, replicas: int) -> Figure:
    """Planned twice as dear as measured."""
    record = {
        "step": 3,
        "meet": meet,
        "replicas": replicas,
        "shapes": [[{"1x32x32": 2} if cost else None for cost in row] for row in COSTS],
        "num_tokens": (COSTS * 100).tolist(),
        "costs_us": (COSTS * 2e6).tolist(),
        "busy_s": COSTS.tolist(),
    }
    return schedule_figure([record, record | {"step": 4}])


def policies(meet: str, replicas: int) -> Figure:
    step = {"busy_s": COSTS.tolist(), "step_s": step_time(COSTS, meet, replicas)}
    return policies_figure([{"meet": meet, "replicas": replicas, "steps": [step, step]}] * 2, ["a", "b"])


def drawn(axes: Axes, waiting: str) -> tuple[float, float]:
    """Length of all bars of the colour that lies behind the work, and of all others."""
    widths = [(patch.get_facecolor() == to_rgba(waiting), patch.get_width()) for patch in axes.patches]
    return sum(width for is_behind, width in widths if is_behind), sum(width for behind, width in widths if not behind)


@pytest.mark.parametrize(("meet", "replicas"), MEETINGS)
@pytest.mark.parametrize(("draw", "waiting"), [(timeline, "#d9d9d9"), (policies, "#e3b5a4")])
def test_waiting_that_is_drawn_is_the_idle_share(
    draw: Callable[[str, int], Figure], waiting: str, meet: str, replicas: int
) -> None:
    """At meet "step" the timeline knew the step's end alone; policies.png knew no groups of ranks."""
    figure = draw(meet, replicas)
    for axes, unit in zip(figure.axes, (2 if draw is timeline else 1, 1), strict=False):
        all_s, busy_s = drawn(axes, waiting)
        assert 1 - busy_s / all_s == pytest.approx(idle_share(COSTS, meet, replicas))
        assert all_s / 2 / 4 == pytest.approx(unit * step_time(COSTS, meet, replicas)), "of two steps, four ranks"
        ends = [line.get_xdata()[0] for line in axes.lines]
        assert ends == pytest.approx([all_s / 8, all_s / 4])
    plt.close(figure)


def test_backward_of_the_last_micro_batches_begins_together() -> None:
    figure = timeline("step", 1)
    end = step_time(COSTS, "step")
    bars = [bar for bar in figure.axes[1].patches if bar.get_hatch() and bar.get_width() and bar.get_x() < end]
    assert sorted(bar.get_width() for bar in bars) == pytest.approx(sorted(np.array([3, 1, 2, 4]) * 2 / 3))
    assert {round(bar.get_x(), 6) for bar in bars} == {10.0}, "rank 0 has 8 + 1 + 3 / 3 before it"
    labels = [text for text in figure.axes[1].texts if text.get_position()[0] < end]
    assert len(labels) == np.count_nonzero(COSTS), "a micro-batch in two parts is counted once"
    plt.close(figure)


def test_timelines_of_many_ranks_stop_growing() -> None:
    """At 1,024 ranks the picture had 120,000 lines, more than can be written."""
    many = {"shapes": [[{"1x32x32": 1}] * 100], "num_tokens": [[9] * 100], "costs_us": [[9.0] * 100]}
    record = {"step": 0, "meet": "slot", **many, "busy_s": [[1.0] * 100]}
    figure = schedule_figure([record])
    assert figure.get_figheight() < 40
    plt.close(figure)


@pytest.mark.parametrize("meet", ["slot", "step"])
def test_waiting_of_a_simulated_step_is_drawn(meet: str) -> None:
    """At meet "step" none was, beside an idle share."""
    row = {"meet": meet, "world_size": 4, "memory_limit_tokens": 9, "slots_us": COSTS * 1e6, "policy": "balanced"}
    figure = slots_figure([row | {"idle_share": 0.0, "load_cv": 0.0}])
    all_s, busy_s = drawn(figure.axes[0], "#d9d9d9")
    assert 1 - busy_s / all_s == pytest.approx(idle_share(COSTS, meet))
    plt.close(figure)


@pytest.mark.parametrize("has_measured", [True, False])
def test_planned_load_is_drawn_beside_the_same_figure_of_what_was_measured(has_measured: bool) -> None:
    keys = ("load_cv", "step_time_cv", "idle_share_planned", "idle_share") + ("measured_cv",) * has_measured
    rows = [{"step": step, **{f"imbalance/{key}": len(key) / 100 for key in keys}} for step in range(5)]
    figure = imbalance_figure(rows)
    values = [sorted({float(line.get_ydata()[-1]) for line in axes.lines}) for axes in figure.axes]
    assert values == [[0.07, 0.11] if has_measured else [0.07], [0.12], [0.1, 0.18]]
    plt.close(figure)
