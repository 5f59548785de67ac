"""Planning for ranks that meet at every slot: peel off what is too dear to level, level the rest.

1. Peel. While the dearest sample left costs more than the mean load of the slots still needed, open a slot whose level
   is that sample's cost and fill the other ranks up to it, within memory: work in the shadow of the straggler is free.
2. Level. Spread the rest over as many slots as are still needed; bins of near-equal load then meet.

More slots level better and cost their overhead: the fewest that memory allows and one more are tried, for the mean
that decides what to peel and for the levelling apart. Peeling with a slot to spare and levelling without is often best.
"""

from itertools import product

import numpy as np

from adaptiveload.scheduling.bins import BinRow, Classes, IntArray, deal, share_out
from adaptiveload.scheduling.totals import EvenSlot, time_in_thirds_us


class SlotPlanner:
    """Plans one step over `ranks` ranks; see `plan_step` for the arguments."""

    def __init__(
        self, classes: Classes, ranks: int, mem_cap: int, speed_permille: IntArray | None, min_slots: int
    ) -> None:
        self.classes = classes
        self.ranks = ranks
        self.mem_cap = mem_cap
        self.speed_permille = speed_permille
        self.min_slots = min_slots

    def best(self, cost: IntArray, slot_overhead_us: int) -> list[list[list[int]]]:
        """Slots of the fastest of the plans tried, the one with fewer slots if they are equal; `cost` is int64 [n]."""
        plans = [self._rows(*spare) for spare in product((0, 1), repeat=2)]
        rows, level_rows = min(plans, key=lambda plan: self._duration(plan[0], plan[1], slot_overhead_us))
        return self._slots(rows, level_rows, cost)

    def even_slots(self, slot_overhead_us: int) -> list[EvenSlot]:
        """Slots of the plans tried in which every rank has work, the best to meet in first.

        That is a slot of a plan with few slots, in which the ranks' loads are near each other.
        """
        found: list[tuple[int, EvenSlot]] = []
        for peeled, levelled in (self._rows(*spare) for spare in product((0, 1), repeat=2)):
            loads, bins = self._loads(peeled, levelled), self._bins(peeled, levelled)
            placements = [placement for row in (*peeled, *filter(None, [levelled])) for placement in row.placements]
            for load, of_ranks in zip(loads, bins, strict=True):
                if load.all():
                    time = time_in_thirds_us(len(loads) * np.full_like(load, slot_overhead_us), load - load.min())
                    slot = EvenSlot(load, [part for p in placements for part in p.of_bins(of_ranks)])
                    found.append((time, slot))
        unlike: dict[bytes, EvenSlot] = {}  # plans share many of their slots
        for _, slot in sorted(found, key=lambda each: each[0]):
            unlike.setdefault(slot.load.tobytes(), slot)
        return list(unlike.values())

    def _rows(self, spare_to_peel: int, spare_to_level: int) -> tuple[list[BinRow], BinRow | None]:
        """One `BinRow` for each peeled slot, and one for all levelled slots: [slots * ranks] bins."""
        left, peeled = self.classes.count.copy(), list[BinRow]()
        while left.any():
            fewest, least = self._fewest_slots(left), self.min_slots - len(peeled)
            level = self._peel_level(left, max(fewest + spare_to_peel, least))
            if level is None:
                return peeled, self._level(left, max(fewest + spare_to_level, least), len(peeled) * self.ranks)
            row = BinRow(self.ranks, self.mem_cap, self.speed_permille, level, len(peeled) * self.ranks)
            left = row.fill(self.classes, left)
            peeled.append(row)
        return peeled, None

    def _fewest_slots(self, left: IntArray) -> int:
        """Fewest slots that could hold the samples: by total memory, and by samples of which no two fit together."""
        total = int((left * self.classes.mem).sum())
        alone = int(left[self.classes.mem * 2 > self.mem_cap].sum())
        return max(-(-total // (self.ranks * self.mem_cap)), -(-alone // self.ranks))

    def _peel_level(self, left: IntArray, needed: int) -> int | None:
        """Time of the dearest sample on the fastest rank, if it is above the mean level of `needed` slots."""
        dearest = int(self.classes.cost[np.flatnonzero(left)[0]])
        total = int((left * self.classes.cost).sum())
        if self.speed_permille is None:
            fastest, all_speeds = 1000, 1000 * self.ranks
        else:
            fastest, all_speeds = int(self.speed_permille.max()), int(self.speed_permille.sum())
        level = -(-dearest * 1000 // fastest)
        return level if level * needed * all_speeds > total * 1000 else None

    def _level(self, left: IntArray, num_slots: int, first_bin: int) -> BinRow:
        """All of `left` over `num_slots` slots, or as many more as it takes for all to find room."""
        while True:
            speed = None if self.speed_permille is None else np.tile(self.speed_permille, num_slots)
            row = BinRow(num_slots * self.ranks, self.mem_cap, speed, None, first_bin)
            if not row.fill(self.classes, left).any():
                return row
            num_slots += 1

    def _duration(self, peeled: list[BinRow], levelled: BinRow | None, slot_overhead_us: int) -> tuple[int, int]:
        """Microseconds of the plan's slots, and their number."""
        levels = self._loads(peeled, levelled).max(axis=1)
        return int(levels.sum()) + slot_overhead_us * len(levels), len(levels)

    def _loads(self, peeled: list[BinRow], levelled: BinRow | None) -> IntArray:
        """Load of each slot and rank, int64 [slots, ranks]."""
        loads = [row.load[None] for row in peeled]
        if levelled is not None:
            loads.append(levelled.load[self._order(levelled)])
        return np.concatenate(loads)

    def _bins(self, peeled: list[BinRow], levelled: BinRow | None) -> IntArray:
        """Number of the bin that rank r runs in slot g, int64 [slots, ranks]."""
        bins = [np.arange(self.ranks)[None] + row.first_bin for row in peeled]
        if levelled is not None:
            bins.append(self._order(levelled) + levelled.first_bin)
        return np.concatenate(bins)

    def _order(self, row: BinRow) -> IntArray:
        """Bin that rank r runs in slot g, int64 [slots, ranks]: neighbours in falling load meet.

        Bin b was filled at the speed of rank b % ranks, so bins are sorted among the ranks of equal speed.
        """
        num_slots = len(row.load) // self.ranks
        order = np.empty((num_slots, self.ranks), np.int64)
        speed = np.zeros(self.ranks, np.int64) if self.speed_permille is None else self.speed_permille
        for value in np.unique(speed):
            peers = np.flatnonzero(speed == value)
            bins = (np.arange(num_slots)[:, None] * self.ranks + peers).reshape(-1)
            falling = bins[np.argsort(-row.load[bins], kind="stable")]
            order[:, peers] = falling.reshape(num_slots, len(peers))
        return order

    def _slots(self, peeled: list[BinRow], levelled: BinRow | None, cost: IntArray) -> list[list[list[int]]]:
        """Samples of each slot and rank, slots of higher level first."""
        rows = [*peeled, *([] if levelled is None else [levelled])]
        placements = [placement for row in rows for placement in row.placements]
        bins = deal(self.classes, placements, sum(len(row.load) for row in rows))
        levels = self._loads(peeled, levelled).max(axis=1).tolist()
        slots = [[bins[b] for b in of_ranks] for of_ranks in self._bins(peeled, levelled).tolist()]
        slots = [slots[g] for g in sorted(range(len(slots)), key=lambda g: -levels[g])]
        slots += [[[] for _ in range(self.ranks)] for _ in range(self.min_slots - len(slots))]
        for slot in slots:
            share_out(slot, cost)
        return slots
