"""Which rank holds the others back over the last steps, whether always the same, and by its work or its data."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Seconds of a rank are known to a few per cent; a rank that stands out by less costs less than a look at it.
MIN_EXCESS = 0.02
# How often chance alone may make ranks that are all alike look like one slow rank.
FALSE_ALARM = 0.01
LAST_STEPS = 20
# Of a step's wall seconds, on the rank that waits least for others: more than optimizer, embeddings and head take.
# In seconds too: on 2 CPU ranks they take a quarter of the quickstart's steps, 0.15 s, and most of a test's of 0.2 s.
MIN_ELSEWHERE, MIN_ELSEWHERE_S = 0.3, 0.5
# What goes on is not told again, and it has not ended before it falls below this share.
ENDED_ELSEWHERE = 0.2


@dataclass(frozen=True)
class Straggler:
    """The rank whose own seconds, busy or waiting for its data, stand highest over some steps.

    Attributes:
        rank: Its number.
        excess: How much longer it took than the mean of the others: 0.1 is 10 %, the median over the steps.
        num_longest: Steps in which it took longest of all.
        num_steps: Steps looked at.
        num_ranks: Ranks of them.
        is_for_data: Whether most of what it took longer went into waiting for its data.
    """

    rank: int
    excess: float
    num_longest: int
    num_steps: int
    num_ranks: int
    is_for_data: bool = False

    @property
    def is_persistent(self) -> bool:
        """Whether it is longest more often than the luckiest of equal ranks would be by chance."""
        from scipy.stats import binom  # takes a second to import

        chance = self.num_ranks * binom.sf(self.num_longest - 1, self.num_steps, 1 / self.num_ranks)
        return bool(chance < FALSE_ALARM)

    @property
    def stands_out(self) -> bool:
        """Whether it is always this rank, by enough to matter."""
        return self.excess >= MIN_EXCESS and self.is_persistent

    def describe(self, planned_excess: float | None = None) -> str:
        """One sentence for people.

        Args:
            planned_excess: How much more than the others the rank had to do by plan, if known; 0.1 is 10 %.
        """
        what = (
            f"rank {self.rank} took {abs(self.excess):.1%} {'longer' if self.excess >= 0 else 'shorter'} than the "
            f"others over the last {self.num_steps} steps (median), and longest in {self.num_longest} of them"
        )
        if planned_excess is not None:
            side = "above" if planned_excess >= 0 else "below"
            what += f"; its planned cost was {abs(planned_excess):.1%} {side} theirs"
        if not self.is_persistent:
            return f"No straggler stands out: {what}. Which rank is last changes from step to step."
        if not self.stands_out:
            return f"No straggler to speak of: {what}. It is mostly the same rank, by less than {MIN_EXCESS:.0%}."
        if self.is_for_data:
            return f"Straggler: {what}. It waits for its data: look at its storage and its CPU, or data.num_workers."
        if planned_excess is not None and planned_excess > self.excess / 2:
            return f"Straggler: {what}. The plan gives this rank more work."
        return f"Straggler: {what}. It computes, slower than the plan expects: look at this rank's GPU."


@dataclass(frozen=True)
class Elsewhere:
    """What even the rank that waits least for others spends on neither blocks nor data, medians over some steps.

    Attributes:
        share: Of a step's wall seconds.
        seconds: Of a step.
    """

    share: float
    seconds: float

    @classmethod
    def of(cls, metrics: Sequence[dict[str, Any]], busy_s: np.ndarray) -> "Elsewhere":
        """From rows of `metrics.jsonl`, and their busy seconds [steps, R]."""
        step_s = seconds_by_rank(metrics, "step_s")
        if step_s.shape != busy_s.shape:
            return cls(0.0, 0.0)
        left_s = step_s - busy_s - _waits(metrics, busy_s)
        return cls(float(np.median((left_s / step_s).min(1))), float(np.median(left_s.min(1))))

    @property
    def matters(self) -> bool:
        """Whether it is more than a healthy run takes."""
        return self.share >= MIN_ELSEWHERE and self.seconds >= MIN_ELSEWHERE_S

    def describe(self) -> str:
        """One sentence for people."""
        return (
            f"{self.share:.0%} of a step ({self.seconds:.1f} s) went into neither blocks nor data on any rank: the "
            "exchange between ranks, if not the optimizer or the host. No rank can be told from that: all wait for the "
            "slowest link."
        )


def find_straggler(busy_s: np.ndarray, waits_s: np.ndarray | None = None) -> Straggler | None:
    """The rank that stands highest in the sum of both; None for a single rank or without steps.

    Args:
        busy_s: Busy seconds, float [steps, R].
        waits_s: Seconds of waiting for data, alike; None takes none.

    Raises:
        ValueError: If `busy_s` is not [steps, R].
    """
    if busy_s.ndim != 2:
        raise ValueError(f"busy seconds must be [steps, ranks], got shape {busy_s.shape}")
    num_steps, num_ranks = busy_s.shape
    if num_steps == 0 or num_ranks < 2:
        return None
    waits_s = np.zeros_like(busy_s) if waits_s is None else waits_s
    own_s = busy_s + waits_s
    excess = excess_by_rank(own_s)
    rank = int(excess.argmax())
    num_longest = int((own_s.argmax(1) == rank).sum())
    others = np.arange(num_ranks) != rank
    of_waits, of_all = (np.median(part[:, rank] - part[:, others].mean(1)) for part in (waits_s, own_s))
    return Straggler(rank, float(excess[rank]), num_longest, num_steps, num_ranks, bool(of_waits > of_all / 2))


def excess_by_rank(work: np.ndarray) -> np.ndarray:
    """Work of each rank over the mean of the others, less 1: of [steps, R] the median over the steps, [R]."""
    others = (work.sum(1, keepdims=True) - work) / (work.shape[1] - 1)
    return np.median(work / np.maximum(others, np.finfo(float).tiny) - 1, axis=0)


def seconds_by_rank(metrics: Sequence[dict[str, Any]], name: str = "busy_s") -> np.ndarray:
    """Seconds of each step and rank from rows of `metrics.jsonl`, [steps, R]: `busy_s`, `data_wait_s` or `step_s`.

    NaN where a step had fewer ranks than another one, as after a resume on more of them.
    """
    found = {key for row in metrics for key in row if key.startswith("rank/") and key.endswith(f"/{name}")}
    names = sorted(found, key=lambda key: int(key.split("/")[1]))
    values = [[row.get(name) for name in names] for row in metrics]
    return np.array(values, dtype=float).reshape(len(metrics), len(names))


def straggler_line(metrics: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]]) -> str:
    """Names the straggler of the last steps of a run, from rows of `metrics.jsonl` and of `schedule.jsonl`."""
    last = _alike([row for row in metrics if "rank/000/busy_s" in row][-LAST_STEPS:])
    busy_s = seconds_by_rank(last)
    if last and busy_s.shape[1] < 2:
        return "One rank alone: none waits for another."
    straggler = find_straggler(busy_s, _waits(last, busy_s))
    if straggler is None:
        return "Busy seconds of the last steps are not known."
    steps = {row["step"] for row in last}
    costs = [np.sum(record["costs_us"], axis=0) for record in records if record["step"] in steps]
    planned = [work for work in costs if len(work) == straggler.num_ranks]
    line = straggler.describe(float(excess_by_rank(np.array(planned))[straggler.rank]) if planned else None)
    elsewhere = Elsewhere.of(last, busy_s)
    return f"{line} {elsewhere.describe()}" if elsewhere.matters else line


class StragglerWatch:
    """Names what holds a run back while it goes on, after each `LAST_STEPS` steps: the straggler, unless it was named
    the last time, and an exchange between ranks that is slow for all of them, once until it has ended.
    """

    def __init__(self) -> None:
        self._has_told_exchange = False
        self._metrics: deque[dict[str, Any]] = deque(maxlen=LAST_STEPS)
        self._records: deque[dict[str, Any]] = deque(maxlen=LAST_STEPS)
        self._seen = 0
        self._named: tuple[int, bool] | None = None

    def after_step(self, row: dict[str, Any], costs_us: np.ndarray) -> str | None:
        """What to say after a step.

        Args:
            row: Its figures, and `step`.
            costs_us: Planned microseconds [G, R].
        """
        self._metrics.append(row)
        self._records.append({"step": row["step"], "costs_us": costs_us})
        self._seen += 1
        if self._seen % LAST_STEPS:
            return None
        metrics = list(self._metrics)
        busy_s = seconds_by_rank(metrics)
        straggler = find_straggler(busy_s, _waits(metrics, busy_s))
        if straggler is None:
            return None
        elsewhere = Elsewhere.of(metrics, busy_s)
        is_new = elsewhere.matters and not self._has_told_exchange
        self._has_told_exchange = elsewhere.matters or (self._has_told_exchange and elsewhere.share >= ENDED_ELSEWHERE)
        before, self._named = self._named, None
        if straggler.stands_out:
            self._named = (straggler.rank, straggler.is_for_data)
            if self._named != before:
                return straggler_line(metrics, list(self._records))
        return elsewhere.describe() if is_new else None


def _alike(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of as many ranks as the last one: before a resume there may have been fewer, or more."""
    counts = [sum(key.endswith("/busy_s") for key in row) for row in metrics]
    return [row for row, count in zip(metrics, counts, strict=True) if count == counts[-1]]


def _waits(metrics: Sequence[dict[str, Any]], busy_s: np.ndarray) -> np.ndarray:
    waits_s = seconds_by_rank(metrics, "data_wait_s")
    return np.nan_to_num(waits_s) if waits_s.shape == busy_s.shape else np.zeros_like(busy_s)  # older runs lack them
