"""A slow rank is named within 20 steps, equal ranks hardly ever, and the plan is told from the machine."""

import re
from pathlib import Path

import numpy as np
import pytest

from adaptiveload.training.figures import busy_figure
from adaptiveload.training.stragglers import StragglerWatch, find_straggler, seconds_by_rank, straggler_line
from tests.launching import launch

NUM_STEPS, NUM_RANKS = 20, 8


def noisy(rng: np.random.Generator, num_ranks: int = NUM_RANKS) -> np.ndarray:
    """Busy seconds of equal ranks in steps of different length, with 3 % of jitter."""
    return rng.uniform(5, 15, (NUM_STEPS, 1)) * (1 + 0.03 * rng.standard_normal((NUM_STEPS, num_ranks)))


def rows(busy_s: np.ndarray, first: int = 0) -> list[dict]:
    return [
        {"step": first + s, **{f"rank/{r:03d}/busy_s": float(b) for r, b in enumerate(row)}}
        for s, row in enumerate(busy_s)
    ]


def exchanging(busy_s: np.ndarray, waits_s: np.ndarray, exchange: float) -> list[dict]:
    """Rows of steps that take so many times what their slowest rank takes for itself."""
    metrics = rows(busy_s)
    for row, waits, step_s in zip(metrics, waits_s, exchange * (busy_s + waits_s).max(1), strict=True):
        row |= {f"rank/{r:03d}/data_wait_s": wait for r, wait in enumerate(waits)}
        row |= {f"rank/{r:03d}/step_s": step_s for r in range(busy_s.shape[1])}
    return metrics


def test_slow_rank_is_named_with_its_excess() -> None:
    busy_s = noisy(np.random.default_rng(0))
    busy_s[:, 5] *= 1.1
    found = find_straggler(busy_s)
    assert found.rank == 5
    assert found.is_persistent
    assert found.excess == pytest.approx(0.1, abs=0.02)  # the median of 20 steps of 3 % jitter is good to 1 %
    assert straggler_line(rows(busy_s), []).startswith("Straggler: rank 5 took")


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_equal_ranks_have_no_straggler(num_ranks: int) -> None:
    rng = np.random.default_rng(1)
    alarms = sum(find_straggler(noisy(rng, num_ranks)).is_persistent for _ in range(500))
    assert alarms <= 12  # 1 % of 500, and 3 standard deviations


def test_hiccups_of_different_ranks_are_told_from_a_slow_one() -> None:
    rng = np.random.default_rng(2)
    busy_s = noisy(rng)
    busy_s[np.arange(NUM_STEPS), rng.integers(NUM_RANKS, size=NUM_STEPS)] *= 1.5
    assert straggler_line(rows(busy_s), []).startswith("No straggler stands out")


def test_steady_but_tiny_lag_is_not_worth_a_name() -> None:
    busy_s = np.full((NUM_STEPS, 4), 10.0)
    busy_s[:, 2] = 10.05
    assert straggler_line(rows(busy_s), []).startswith("No straggler to speak of: rank 2 took 0.5% longer")


def test_plan_that_gives_a_rank_more_is_blamed_itself() -> None:
    busy_s = np.full((NUM_STEPS, 2), 10.0)
    busy_s[:, 1] = 12.0
    even = [{"step": step, "costs_us": [[6e6, 4e6], [4e6, 6e6]]} for step in range(NUM_STEPS)]
    uneven = [{"step": step, "costs_us": [[10e6, 12e6]]} for step in range(NUM_STEPS)]
    assert "planned cost was 0.0% above theirs. It computes, slower" in straggler_line(rows(busy_s), even)
    assert "planned cost was 20.0% above theirs. The plan gives" in straggler_line(rows(busy_s), uneven)


def test_rank_that_waits_for_its_data_and_slow_exchange_are_told_from_slow_work() -> None:
    rng = np.random.default_rng(3)
    busy_s = noisy(rng)
    waits_s = np.full_like(busy_s, 0.1)
    waits_s[:, 3] = 5.0

    def line(exchange: float) -> str:
        return straggler_line(exchanging(busy_s, waits_s, exchange), [])

    assert line(1.1).startswith("Straggler: rank 3 took")
    assert "waits for its data" in line(1.1)
    assert "neither blocks nor data" not in line(1.1)
    assert re.search(r"50% of a step \(\d+\.\d s\) went into neither blocks nor data on any rank", line(2.0))


def test_exchange_that_is_slow_for_all_ranks_is_told_once_until_it_has_ended() -> None:
    """No rank stands out then; the log of the run once said nothing at all."""
    rng, watch = np.random.default_rng(4), StragglerWatch()

    def said(exchange: float, scale: float = 1.0, num_ranks: int = NUM_RANKS) -> list[str]:
        """In two times 20 steps, of which equal ranks work 5 to 15 s times `scale`."""
        lines = []
        for _ in range(2):
            busy_s = scale * noisy(rng, num_ranks)
            lines += [
                watch.after_step(row, np.ones((1, num_ranks))) for row in exchanging(busy_s, 0 * busy_s, exchange)
            ]
        return [line for line in lines if line]

    assert said(1.2) == []
    (line,) = said(2.0)
    assert line.startswith("5")
    assert "% of a step (" in line
    assert "the exchange between ranks" in line
    assert said(1.4) == []  # on the border of what is told
    assert said(2.0) == []
    assert said(1.1) == []
    assert len(said(2.0)) == 1
    assert said(1.1) == []
    # Steps of a toy: optimizer and host take most of them. The quickstart's, measured, have 0.28 of 0.5 s at most.
    assert said(3.0, scale=0.02) == []
    assert said(2.0, num_ranks=1) == []


def test_ranks_are_in_the_order_of_their_numbers() -> None:
    """As text, 1000 comes before 101."""
    busy_s = np.arange(1002.0)[None]
    assert seconds_by_rank(rows(busy_s)).tolist() == busy_s.tolist()


def test_ranks_slowed_on_purpose_are_named_within_20_steps(run_config: Path, tmp_path: Path) -> None:
    launch(run_config, tmp_path, ranks=2, script="tests/training/slowed_rank.py")
    said = {name: (tmp_path / name).read_text() for name in ("work", "data")}
    for name, words in (("work", "It computes, slower than the plan expects"), ("data", "It waits for its data")):
        assert said[name].startswith("step 19: Straggler: rank 1 took"), said[name]
        assert words in said[name]


def test_steps_on_another_number_of_ranks_are_left_out() -> None:
    before, after = np.full((15, 4), 1.0), np.full((5, 2), 3.0)
    metrics = rows(before) + rows(after, first=15)
    records = [{"step": step, "costs_us": [[1.0] * (4 if step < 15 else 2)]} for step in range(20)]
    assert "over the last 5 steps" in straggler_line(metrics, records)
    busy_s = seconds_by_rank(metrics)
    assert busy_s.shape == (20, 4)
    assert np.isnan(busy_s[15:, 2:]).all()
    assert straggler_line(rows(np.ones((3, 1))), []) == "One rank alone: none waits for another."


def test_heat_map_of_a_long_run_shows_means_of_steps() -> None:
    busy_s = np.arange(1, 1001, dtype=float)[:, None] * [1.0, 3.0, np.nan]
    figure = busy_figure(range(1000), busy_s)
    seconds, percent = (np.ma.filled(axes.collections[0].get_array(), np.nan) for axes in figure.axes[:2])
    assert seconds.shape == percent.shape == (3, 334)  # 1000 steps, 3 in a column
    assert seconds[:2, 0] == pytest.approx([2.0, 6.0])
    assert percent[:2] == pytest.approx(np.repeat([[-50.0], [50.0]], 334, axis=1))
    assert np.isnan(seconds[2]).all()


def test_heat_map_stretches_over_steps_without_figures_of_ranks() -> None:
    """Of 100 ranks until a resume on fewer at step 200."""
    figure = busy_figure([0, 50, 100, 150, 200, 201, 202, 203, 204, 205, 206], np.ones((11, 3)))
    edges = figure.axes[0].collections[0].get_coordinates()[0, :, 0]
    assert edges.tolist() == [-0.5, 49.5, 99.5, 149.5, *np.arange(199.5, 207)]
    assert figure.axes[0].get_ylim() == (2.5, -0.5)
