"""The paper's policies, as baselines: every rank fills its own buckets, and a full bucket is a micro-batch.

Our reading of AdaptiveLoad, section 2: rank r takes the draws at positions p with p mod ranks = r. A bucket that holds
its batch size emits a micro-batch. A step is `slots_per_step` emissions of every rank. At the end of an epoch partial
buckets emit what they hold, by shape, and ranks that have run out run fillers. So every sample runs once an epoch.
"""

from dataclasses import dataclass

import numpy as np

from adaptiveload.scheduling.assemble import StepAssembler
from adaptiveload.scheduling.cost import IntArray
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.plan import StepPlan


@dataclass(frozen=True, eq=False)
class Emissions:
    """Micro-batches of an epoch, or of what is left of one, by rank and then by time; `m` of them.

    Attributes:
        first_step: Step of each rank's first micro-batch.
        rows: int64 [n], draws of the epoch, all of one micro-batch side by side.
        starts: int64 [m], first of `rows` of each micro-batch.
        sizes: int64 [m], samples of each.
        offsets: int64 [ranks + 1], micro-batches of each rank.
        step_starts: int64 [steps + 1], samples of the epoch that run before each of the steps.
    """

    first_step: int
    rows: IntArray
    starts: IntArray
    sizes: IntArray
    offsets: IntArray
    step_starts: IntArray

    @property
    def end_step(self) -> int:
        """First step after the last micro-batch."""
        return self.first_step + len(self.step_starts) - 1


class BucketPolicy:
    """`equal_token` and `dual_constraint`: they differ in the batch sizes alone.

    `plan` replays the order from the start of the epoch, so it gives the same plan out of the blue as in sequence. New
    batch sizes (`CostHistory`) hold from their step on: what no rank has run by then is emitted anew under them.
    """

    def __init__(
        self, assembler: StepAssembler, order: EndlessOrder, ranks: int, batch_sizes: IntArray, slots_per_step: int
    ) -> None:
        """Policy over `order` with batch_sizes int64 [num shapes], one for each bucket, to start with."""
        self.assembler = assembler
        self.order = order
        self.ranks = ranks
        self.batch_sizes = batch_sizes
        self.slots_per_step = slots_per_step
        self._first_steps = [0]  # first step of each epoch known so far
        self._latest: tuple[int, list[Emissions]] | None = None
        self._num_updates = 0

    @property
    def steps_in_first_epoch(self) -> int:
        """Steps until every sample has run once."""
        return self._emissions(0)[-1].end_step

    def plan(self, step: int) -> StepPlan:
        """Plan of optimizer step `step`, from 0."""
        epoch = self._epoch_of(step)
        emissions = next(part for part in reversed(self._emissions(epoch)) if part.first_step <= step)
        in_part = step - emissions.first_step
        slots: list[list[list[int]]] = [[] for _ in range(self.slots_per_step)]
        picked: list[IntArray] = []
        num_picked = 0
        for slot in range(self.slots_per_step):
            for rank in range(self.ranks):
                batch = int(emissions.offsets[rank]) + in_part * self.slots_per_step + slot
                size = int(emissions.sizes[batch]) if batch < emissions.offsets[rank + 1] else 0
                slots[slot].append(list(range(num_picked, num_picked + size)))
                if size:
                    picked.append(emissions.starts[batch] + np.arange(size))
                num_picked += size
        start = epoch * self.order.epoch_size
        draws = self.order.at(start + emissions.rows[np.concatenate(picked)])
        return self.assembler.assemble(step, start + int(emissions.step_starts[in_part]), draws, slots)

    def _epoch_of(self, step: int) -> int:
        updates = self.assembler.costs.updates
        if len(updates) > self._num_updates:  # epochs that start by the first new update are as they were
            border = updates[self._num_updates].from_step
            self._first_steps = [first for first in self._first_steps if first <= border]
            self._latest, self._num_updates = None, len(updates)
        while self._first_steps[-1] <= step:
            epoch = len(self._first_steps) - 1
            self._first_steps.append(self._emissions(epoch)[-1].end_step)
        return int(np.searchsorted(self._first_steps, step, side="right")) - 1

    def _emissions(self, epoch: int) -> list[Emissions]:
        """Micro-batches of `epoch`: one part for each set of batch sizes that it runs under."""
        if self._latest is None or self._latest[0] != epoch:
            self._latest = (epoch, self._replay(epoch))
        return self._latest[1]

    def _replay(self, epoch: int) -> list[Emissions]:
        first, sizes = self._first_steps[epoch], self.batch_sizes
        changes = [
            (u.from_step, np.array(u.batch_sizes, np.int64)) for u in self.assembler.costs.updates if u.batch_sizes
        ]
        for from_step, changed in changes:
            if from_step <= first:
                sizes = changed
        parts = [self._emit(epoch, first, np.arange(self.order.epoch_size), sizes)]
        for from_step, changed in changes:
            if first < from_step < parts[-1].end_step:
                left = self._left(parts[-1], from_step)
                parts.append(self._emit(epoch, from_step, left, changed))
        return parts

    def _left(self, emissions: Emissions, step: int) -> IntArray:
        """Draws of the epoch that have not run before `step`, int64, rising."""
        in_rank = np.arange(len(emissions.sizes)) - np.repeat(emissions.offsets[:-1], np.diff(emissions.offsets))
        waits = in_rank >= (step - emissions.first_step) * self.slots_per_step
        picked = [
            emissions.rows[start : start + size]
            for start, size in zip(emissions.starts[waits], emissions.sizes[waits], strict=True)
        ]
        return np.sort(np.concatenate(picked))

    def _emit(self, epoch: int, first_step: int, left: IntArray, batch_sizes: IntArray) -> Emissions:
        """Micro-batches of the draws `left` of `epoch`, int64 and rising, from `first_step` on."""
        start, count = epoch * self.order.epoch_size, len(left)
        buckets = self.assembler.table.shape_ids[self.order.at(start + left).ids].astype(np.int64)
        draw_ranks = (start + left) % self.ranks
        queues = draw_ranks * len(batch_sizes) + buckets
        by_queue = np.argsort(queues, kind="stable")  # the draws of one rank and bucket side by side, in order
        in_queue = np.arange(count) - np.searchsorted(queues[by_queue], queues[by_queue])
        starts = np.flatnonzero(in_queue % batch_sizes[buckets[by_queue]] == 0)
        sizes = np.diff(starts, append=count)
        first_draw, last_draw = by_queue[starts], by_queue[starts + sizes - 1]
        is_full = sizes == batch_sizes[buckets[first_draw]]
        time = np.where(is_full, last_draw, count + buckets[first_draw])
        ranks = draw_ranks[first_draw]
        by_time = np.lexsort((time, ranks))
        offsets = np.concatenate(([0], np.cumsum(np.bincount(ranks, minlength=self.ranks))))
        steps = (np.arange(len(starts)) - offsets[ranks[by_time]]) // self.slots_per_step
        step_sizes = np.zeros(int(steps.max()) + 1, np.int64)
        np.add.at(step_sizes, steps, sizes[by_time])
        step_starts = self.order.epoch_size - count + np.concatenate(([0], np.cumsum(step_sizes)))
        return Emissions(first_step, left[by_queue], starts[by_time], sizes[by_time], offsets, step_starts)
