"""Planning for ranks that meet once a step: equal totals, micro-batches within memory on each rank alone.

Ranks meet in the backward of their last micro-batches, whose gradients are reduced block by block: there the slowest
sets the pace. So the step ends with a slot of the plan for ranks that meet in every slot (`peel`), one in which their
loads are near each other, and the totals are levelled before it.

A rank's total counts the fixed overhead of its micro-batches, whose number follows from memory. So the cheapest
samples ("sand") are held back until the dear ones ("rocks") are dealt and packed, and then level the totals in the room
that is left.
"""

from dataclasses import dataclass

import numpy as np

from adaptiveload.scheduling.bins import BinRow, Classes, IntArray, Placement, deal, share_out, times, water_fill
from adaptiveload.scheduling.metrics import ALL_PARTS, BACKWARD_PARTS

SAND_OVERHEADS = 3  # sand a rank, in slot overheads: ranks differ by up to about that many micro-batches


def time_in_thirds_us(totals: IntArray, last: IntArray) -> int:
    """Time of a step whose ranks meet in their last backward, in thirds of a microsecond: a backward is two of three.

    Args:
        totals: int64 [ranks], all work of each.
        last: int64 [ranks], of that the last micro-batch.
    """
    return int((ALL_PARTS * totals - BACKWARD_PARTS * last).max()) + BACKWARD_PARTS * int(last.max())


@dataclass(frozen=True, eq=False)
class EvenSlot:
    """Micro-batches, one a rank, that may be the last of a step.

    Attributes:
        load: int64 [ranks], microseconds of each, `slot_overhead_us` left out.
        placements: Samples by class, in bins 0 to ranks - 1.
    """

    load: IntArray
    placements: list[Placement]


class TotalsPlan:
    """One step over `ranks` ranks; see `plan_step` for the arguments.

    Attributes:
        time_thirds_us: Time of the step; see `time_in_thirds_us`.
    """

    def __init__(
        self,
        classes: Classes,
        ranks: int,
        mem_cap: int,
        slot_overhead_us: int,
        speed_permille: IntArray | None,
        last: EvenSlot | None,
    ) -> None:
        """Plan the samples of `classes`; the step ends with `last`, if there is one that all ranks share."""
        self.classes = classes
        self.ranks = ranks
        self.mem_cap = mem_cap
        self.slot_overhead_us = slot_overhead_us
        self.speed_permille = speed_permille
        self.last = last
        self._room: list[IntArray] = []  # memory left in the g-th micro-batch of each rank, int64 [ranks]
        self._is_open: list[IntArray] = []  # 1 where a rank has a g-th micro-batch
        self._placements: list[Placement] = []
        counts = classes.count.copy()
        if last is None:
            totals = self._place(counts, np.zeros(ranks, np.int64))
            self.time_thirds_us = time_in_thirds_us(totals, self._ends())
            return
        for placement in last.placements:
            counts[placement.class_id] -= placement.counts.sum()
        last_load = last.load + slot_overhead_us
        self.time_thirds_us = time_in_thirds_us(self._place(counts, last_load), last_load)

    def rows(self, cost: IntArray, min_slots: int) -> list[list[list[int] | None]]:
        """`rows[g][r]`: g-th micro-batch of rank r; `cost` is int64 [n]."""
        num_rows, ranks = len(self._room), self.ranks
        placements = list(self._placements)
        if self.last is not None:
            placements += [Placement(p.class_id, num_rows * ranks, p.counts) for p in self.last.placements]
        bins = deal(self.classes, placements, (num_rows + 1) * ranks)
        queues = [[bins[g * ranks + r] for g in range(num_rows) if self._is_open[g][r]] for r in range(ranks)]
        for rank, queue in enumerate(queues):
            if self.last is not None:
                queue.append(bins[num_rows * ranks + rank])
            queue[:0] = [[] for _ in range(max(min_slots, 1) - len(queue))]
            share_out(queue, cost)
        longest = max(len(queue) for queue in queues)
        return [[queue[g] if g < len(queue) else None for queue in queues] for g in range(longest)]

    def _place(self, counts: IntArray, start: IntArray) -> IntArray:
        """Deal `counts` samples a class to ranks that have `start` to do already; all that each then has."""
        rocks, sand = self._split(counts)
        row = BinRow(self.ranks, int((counts * self.classes.mem).sum()), self.speed_permille)
        row.load += start
        row.fill(self.classes, rocks)
        by_memory = sorted(row.placements, key=lambda p: -int(self.classes.mem[p.class_id]))  # stable
        for placement in by_memory:
            self._first_fit(placement.class_id, placement.counts)
        load = row.load + self.slot_overhead_us * np.sum(self._is_open, axis=0, dtype=np.int64)
        load += self.slot_overhead_us * self._open_where_light(load, sand)
        for class_id in np.flatnonzero(sand).tolist():
            self._pour(class_id, int(sand[class_id]), load)
        return load

    def _ends(self) -> IntArray:
        """Load of the last micro-batch of each rank, int64 [ranks]; 0 where it has none."""
        number = np.sum(self._is_open, axis=0) - 1
        rank_slots = np.cumsum(self._is_open, axis=0) - 1
        ends = np.where(number >= 0, self.slot_overhead_us, 0).astype(np.int64)
        for placement in self._placements:
            slot = placement.first_bin // self.ranks
            is_last = (self._is_open[slot] > 0) & (rank_slots[slot] == number)
            step = times(int(self.classes.cost[placement.class_id]), self.ranks, self.speed_permille)
            ends += is_last * placement.counts * step
        return ends

    def _split(self, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Rocks and sand, samples of each class, int64 [num classes]: sand is the cheapest up to its budget."""
        sand = np.zeros(len(counts), np.int64)
        budget = SAND_OVERHEADS * self.slot_overhead_us * self.ranks
        for class_id in range(len(sand) - 1, -1, -1):
            cost = int(self.classes.cost[class_id])
            if cost > self.slot_overhead_us or budget < cost:
                break
            sand[class_id] = min(int(counts[class_id]), budget // cost)
            budget -= int(sand[class_id]) * cost
        rocks = counts - sand
        return (rocks, sand) if rocks.any() else (sand, rocks)

    def _first_fit(self, class_id: int, counts: IntArray) -> None:
        """Put `counts` samples a rank (int64 [ranks]) into the first micro-batches with room, opening new ones."""
        left, slot, mem = counts, 0, int(self.classes.mem[class_id])
        while left.any():
            if slot == len(self._room):
                self._add_slot()
            put = np.minimum(left, self._room[slot] // mem)
            if put.any():
                self._room[slot] -= put * mem
                self._is_open[slot] |= put > 0
                self._placements.append(Placement(class_id, slot * self.ranks, put))
                left = left - put
            slot += 1

    def _add_slot(self) -> None:
        self._room.append(np.full(self.ranks, self.mem_cap, np.int64))
        self._is_open.append(np.zeros(self.ranks, np.int64))

    def _open_where_light(self, load: IntArray, sand: IntArray) -> IntArray:
        """Open one more micro-batch on ranks that lack the memory, not the time, for their part of `sand`.

        A rank that would stay below the common level by more than the overhead runs another micro-batch for nothing.
        Returns how many were opened on each rank, int64 [ranks].
        """
        sand_cost, sand_mem = int((sand * self.classes.cost).sum()), int((sand * self.classes.mem).sum())
        if not sand_cost:
            return np.zeros(self.ranks, np.int64)
        level = (int(load.sum()) + sand_cost) // self.ranks
        room = np.sum([r * o for r, o in zip(self._room, self._is_open, strict=True)], axis=0)
        is_light: IntArray = (level - load - room * sand_cost // sand_mem > self.slot_overhead_us).astype(np.int64)
        if is_light.any():
            self._add_slot()
            next_slot = np.sum(self._is_open, axis=0)
            for rank in np.flatnonzero(is_light).tolist():
                self._is_open[int(next_slot[rank])][rank] = 1
        return is_light

    def _pour(self, class_id: int, count: int, load: IntArray) -> None:
        """Level `load` (int64 [ranks], changed) with `count` samples of a class, in micro-batches that are open."""
        mem = int(self.classes.mem[class_id])
        step = times(int(self.classes.cost[class_id]), self.ranks, self.speed_permille)
        room = np.minimum(sum(r // mem * o for r, o in zip(self._room, self._is_open, strict=True)), count)
        while int(room.sum()) < count:  # open one more where the total is least
            rank = int(np.argmin(load))
            load[rank] += self.slot_overhead_us
            room[rank] += self.mem_cap // mem
        counts = np.zeros(self.ranks, np.int64)
        ranks = np.flatnonzero(room)
        counts[ranks] = water_fill(load[ranks], room[ranks], step[ranks], count)
        load += counts * step
        self._first_fit(class_id, counts)
