"""Rows of bins that a planner fills: one class of equal samples at a time, always the least loaded bin first.

Placing n equal samples one by one in the least loaded bin with room ends in a level that can be found directly, so the
work depends on the number of classes and bins, not of samples. All numbers are integers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Classes:
    """Samples grouped into classes of equal cost and memory, dearest first, then least memory first.

    Attributes:
        cost: int64 [num classes], microseconds of one sample.
        mem: int64 [num classes], memory of one sample.
        count: int64 [num classes], samples.
        members: Samples of each class, lower index first.
    """

    cost: IntArray
    mem: IntArray
    count: IntArray
    members: list[IntArray]

    @classmethod
    def of(cls, cost: IntArray, mem: IntArray) -> "Classes":
        """Classes of samples with `cost` and `mem`, both int64 [n], n > 0."""
        order = np.lexsort((mem, -cost))  # stable
        sorted_cost, sorted_mem = cost[order], mem[order]
        is_new = (np.diff(sorted_cost) != 0) | (np.diff(sorted_mem) != 0)
        starts = np.concatenate(([0], np.flatnonzero(is_new) + 1))
        members = np.split(order, starts[1:])
        return cls(sorted_cost[starts], sorted_mem[starts], np.array([len(m) for m in members], np.int64), members)


@dataclass(frozen=True, eq=False)
class Placement:
    """Samples of one class put into a run of bins.

    Attributes:
        class_id: Index of the class.
        first_bin: Number of the first bin of the run, counted over the whole plan.
        counts: int64 [bins of the run], samples put into each.
    """

    class_id: int
    first_bin: int
    counts: IntArray

    def of_bins(self, bins: IntArray) -> list["Placement"]:
        """What of it is in `bins` (int64 [n], by number), as bins 0 to n - 1; none if nothing is."""
        inside = (bins >= self.first_bin) & (bins < self.first_bin + len(self.counts))
        counts = np.where(inside, self.counts[np.where(inside, bins - self.first_bin, 0)], 0)
        return [Placement(self.class_id, 0, counts)] if counts.any() else []


def deal(classes: Classes, placements: list[Placement], num_bins: int) -> list[list[int]]:
    """Samples of each bin, ascending. Placements take the members of a class in order."""
    bin_of = np.empty(int(classes.count.sum()), np.int64)
    taken = [0] * len(classes.members)
    for placement in placements:
        bins = np.repeat(np.arange(len(placement.counts)) + placement.first_bin, placement.counts)
        start = taken[placement.class_id]
        bin_of[classes.members[placement.class_id][start : start + len(bins)]] = bins
        taken[placement.class_id] += len(bins)
    assert taken == classes.count.tolist(), "a sample was lost"
    members = np.argsort(bin_of, kind="stable").tolist()
    ends = np.cumsum(np.bincount(bin_of, minlength=num_bins)).tolist()
    return [members[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def water_fill(start: IntArray, room: IntArray, step: IntArray, count: int) -> IntArray:
    """How many of `count` equal samples each bin gets when each goes to the bin with the lowest load that has room.

    Among bins of equal load the lower index comes first.

    Args:
        start: int64 [bins], load of each bin.
        room: int64 [bins], samples that still fit.
        step: int64 [bins], what one sample adds to the load, positive.
        count: Samples to place.

    Returns:
        int64 [bins]; they add up to less than `count` only if the bins are full.
    """
    if int(room.sum()) <= count:
        return room.copy()
    smallest = int(step.min())
    # A sample placed as a bin's j-th starts at load start + j * step. At most `count` of them start below `low`, and
    # more start below `high`. Once the two are a step apart, a bin has at most one start between them, and the lowest
    # starts are picked in order.
    low, high = int(start.min()), int((start + room * step).max())
    while high - low > smallest:
        middle = (low + high) // 2
        if int(_started_below(middle, start, room, step).sum()) <= count:
            low = middle
        else:
            high = middle
    filled = _started_below(low, start, room, step)
    rest = count - int(filled.sum())
    if rest:
        candidates = np.flatnonzero(filled < room)
        starts = (start + filled * step)[candidates]
        filled[candidates[np.argsort(starts, kind="stable")[:rest]]] += 1
    return filled


def _started_below(level: int, start: IntArray, room: IntArray, step: IntArray) -> IntArray:
    """Samples of each bin, int64 [bins], that start at a load below `level`."""
    below: IntArray = np.minimum(np.maximum(-((start - level) // step), 0), room)
    return below


def times(cost: int, num_bins: int, speed_permille: IntArray | None) -> IntArray:
    """Microseconds that `cost` takes in each bin, int64 [bins], rounded up."""
    if speed_permille is None:
        return np.full(num_bins, cost, np.int64)
    slowed: IntArray = -(-cost * 1000 // speed_permille)
    return slowed


class BinRow:
    """Bins side by side, filled class by class under a memory cap and, if given, a load limit."""

    def __init__(
        self, num_bins: int, mem_cap: int, speed_permille: IntArray | None, limit: int | None = None, first_bin: int = 0
    ) -> None:
        """Empty bins.

        Args:
            num_bins: Bins.
            mem_cap: Memory of each.
            speed_permille: int64 [bins], speed of each bin's rank in thousandths; None is 1000 everywhere.
            limit: Most load of a bin, in microseconds on its rank; None is no limit.
            first_bin: Number of the first bin, counted over the whole plan.
        """
        self.load = np.zeros(num_bins, np.int64)
        self.room = np.full(num_bins, mem_cap, np.int64)
        self.speed_permille = speed_permille
        self.limit = limit
        self.first_bin = first_bin
        self.placements: list[Placement] = []

    def fill(self, classes: Classes, counts: IntArray) -> IntArray:
        """Place what fits of `counts` samples a class (int64 [num classes]), dearest first; return what is left."""
        left = counts.copy()
        for class_id in np.flatnonzero(counts).tolist():
            left[class_id] -= self._add(class_id, classes, int(counts[class_id]))
        return left

    def _add(self, class_id: int, classes: Classes, count: int) -> int:
        """Place up to `count` samples of a class; return how many found room."""
        mem = int(classes.mem[class_id])
        step = times(int(classes.cost[class_id]), len(self.load), self.speed_permille)
        room = np.minimum(self.room // mem, count)
        if self.limit is not None:
            room = np.minimum(room, np.maximum(self.limit - self.load, 0) // step)
        bins = np.flatnonzero(room)
        if not len(bins):
            return 0
        filled = np.zeros(len(self.load), np.int64)
        filled[bins] = water_fill(self.load[bins], room[bins], step[bins], count)
        self.load += filled * step
        self.room -= filled * mem
        self.placements.append(Placement(class_id, self.first_bin, filled))
        return int(filled.sum())


def share_out(bins: list[list[int]], cost: IntArray) -> None:
    """Give each empty bin one sample, in place, as long as another bin has two: the cheapest of the longest in turn."""
    empty = [index for index, members in enumerate(bins) if not members]
    if not empty:
        return
    donors = [index for index, members in enumerate(bins) if len(members) > 1]
    donors.sort(key=lambda index: (-int(cost[bins[index]].sum()), index))
    for index in empty:
        if not donors:
            return
        donor = donors.pop(0)
        cheapest = min(bins[donor], key=lambda sample: (int(cost[sample]), -sample))
        bins[donor].remove(cheapest)
        bins[index].append(cheapest)
        if len(bins[donor]) > 1:
            donors.append(donor)
