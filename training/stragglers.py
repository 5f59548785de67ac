"""Which rank holds the others back, told from busy seconds of the last steps, and whether it is always the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binom

# Busy seconds are known to a few per cent; a rank that stands out by less costs less than a look at it.
MIN_EXCESS = 0.02
# How often chance alone may make ranks that are all alike look like one slow rank.
FALSE_ALARM = 0.01
LAST_STEPS = 20


@dataclass(frozen=True)
class Straggler:
    """The rank whose busy seconds stand highest over some steps.

    Attributes:
        rank: Its number.
        excess: How much longer it was busy than the mean of the others: 0.1 is 10 %, the median over the steps.
        num_longest: Steps in which it was busy longest of all.
        num_steps: Steps looked at.
        num_ranks: Ranks of them.
    """

    rank: int
    excess: float
    num_longest: int
    num_steps: int
    num_ranks: int

    @property
    def is_persistent(self) -> bool:
        """Whether it is longest more often than the luckiest of equal ranks would be by chance."""
        chance = self.num_ranks * binom.sf(self.num_longest - 1, self.num_steps, 1 / self.num_ranks)
        return bool(chance < FALSE_ALARM)

    def describe(self, planned_excess: float | None = None) -> str:
        """One sentence for people.

        Args:
            planned_excess: How much more than the others the rank had to do by plan, if known; 0.1 is 10 %.
        """
        what = (
            f"rank {self.rank} was busy {abs(self.excess):.1%} {'longer' if self.excess >= 0 else 'shorter'} than the "
            f"others over the last {self.num_steps} steps (median), and longest in {self.num_longest} of them"
        )
        if planned_excess is not None:
            side = "above" if planned_excess >= 0 else "below"
            what += f"; its planned cost was {abs(planned_excess):.1%} {side} theirs"
        if not self.is_persistent:
            return f"No straggler stands out: {what}. Which rank is last changes from step to step."
        if self.excess < MIN_EXCESS:
            return f"No straggler to speak of: {what}. It is mostly the same rank, by less than {MIN_EXCESS:.0%}."
        if planned_excess is not None and planned_excess > self.excess / 2:
            return f"Straggler: {what}. The plan gives this rank more work."
        return f"Straggler: {what}. It is this one rank, slower than the plan expects."


def find_straggler(busy_s: np.ndarray) -> Straggler | None:
    """The rank that stands highest in `busy_s`, float [steps, R]; None for a single rank or without steps.

    Raises:
        ValueError: If `busy_s` is not [steps, R].
    """
    if busy_s.ndim != 2:
        raise ValueError(f"busy seconds must be [steps, ranks], got shape {busy_s.shape}")
    num_steps, num_ranks = busy_s.shape
    if num_steps == 0 or num_ranks < 2:
        return None
    excess = excess_by_rank(busy_s)
    rank = int(excess.argmax())
    num_longest = int((busy_s.argmax(1) == rank).sum())
    return Straggler(rank, float(excess[rank]), num_longest, num_steps, num_ranks)


def excess_by_rank(work: np.ndarray) -> np.ndarray:
    """Work of each rank over the mean of the others, less 1: of [steps, R] the median over the steps, [R]."""
    others = (work.sum(1, keepdims=True) - work) / (work.shape[1] - 1)
    return np.median(work / np.maximum(others, np.finfo(float).tiny) - 1, axis=0)


def busy_by_rank(metrics: Sequence[dict[str, Any]]) -> np.ndarray:
    """Busy seconds of each step and rank from rows of `metrics.jsonl`, [steps, R].

    NaN where a step had fewer ranks than another one, as after a resume on more of them.
    """
    names = sorted({key for row in metrics for key in row if key.startswith("rank/") and key.endswith("/busy_s")})
    values = [[row.get(name) for name in names] for row in metrics]
    return np.array(values, dtype=float).reshape(len(metrics), len(names))


def straggler_line(metrics: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> str:
    """Names the straggler of the last steps of a run, from rows of `metrics.jsonl` and of `schedule.jsonl`."""
    busy_s = busy_by_rank(metrics[-1:])
    if busy_s.shape[1] < 2:
        return "One rank alone: none waits for another."
    num_ranks = busy_s.shape[1]
    last = metrics[-LAST_STEPS:]
    busy_s = busy_by_rank(last)
    same = np.isfinite(busy_s).sum(1) == num_ranks  # before a resume there may have been fewer ranks, or more
    straggler = find_straggler(busy_s[same][:, :num_ranks])
    if straggler is None:
        return "Busy seconds of the last steps are not known."
    steps = {row["step"] for row, kept in zip(last, same, strict=True) if kept}
    costs = [np.sum(record["costs_us"], axis=0) for record in records if record["step"] in steps]
    planned = [work for work in costs if len(work) == num_ranks]
    return straggler.describe(float(excess_by_rank(np.array(planned))[straggler.rank]) if planned else None)
