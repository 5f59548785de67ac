"""The paper's policies, as baselines: every rank fills its own buckets, and a full bucket is a micro-batch.

Our reading of AdaptiveLoad, section 2: rank r takes the draws at positions p with p mod ranks = r. A bucket that holds
its batch size emits a micro-batch. A step is `slots_per_step` emissions of every rank. At the end of an epoch partial
buckets emit what they hold, by shape, and ranks that have run out run fillers. So every sample runs once an epoch.
"""

from dataclasses import dataclass

import numpy as np

from adaptiveload.scheduling.assemble import StepAssembler
from adaptiveload.scheduling.cost import IntArray
from adaptiveload.scheduling.order import Draws, EndlessOrder
from adaptiveload.scheduling.plan import StepPlan


@dataclass(frozen=True, eq=False)
class Emissions:
    """Micro-batches of one epoch, by rank and then by time; `m` of them.

    Attributes:
        draws: Draws of the epoch, all of one micro-batch side by side.
        starts: int64 [m], first draw of each micro-batch.
        sizes: int64 [m], samples of each.
        offsets: int64 [ranks + 1], micro-batches of each rank.
        step_starts: int64 [steps + 1], samples of the epoch that run before each of its steps.
    """

    draws: Draws
    starts: IntArray
    sizes: IntArray
    offsets: IntArray
    step_starts: IntArray

    @property
    def num_steps(self) -> int:
        """Steps of the epoch."""
        return len(self.step_starts) - 1


class BucketPolicy:
    """`equal_token` and `dual_constraint`: they differ in the batch sizes alone.

    `plan` replays the order from the start of the epoch, so it gives the same plan out of the blue as in sequence.
    """

    def __init__(
        self, assembler: StepAssembler, order: EndlessOrder, ranks: int, batch_sizes: IntArray, slots_per_step: int
    ) -> None:
        """Policy over `order` with batch_sizes int64 [num shapes], one for each bucket."""
        self.assembler = assembler
        self.order = order
        self.ranks = ranks
        self.batch_sizes = batch_sizes
        self.slots_per_step = slots_per_step
        self._first_steps = [0]  # first step of each epoch known so far
        self._latest: tuple[int, Emissions] | None = None

    @property
    def steps_in_first_epoch(self) -> int:
        """Steps until every sample has run once."""
        return self._emissions(0).num_steps

    def plan(self, step: int) -> StepPlan:
        """Plan of optimizer step `step`, from 0."""
        epoch = self._epoch_of(step)
        emissions = self._emissions(epoch)
        in_epoch = step - self._first_steps[epoch]
        slots: list[list[list[int]]] = [[] for _ in range(self.slots_per_step)]
        picked: list[IntArray] = []
        num_picked = 0
        for slot in range(self.slots_per_step):
            for rank in range(self.ranks):
                batch = int(emissions.offsets[rank]) + in_epoch * self.slots_per_step + slot
                size = int(emissions.sizes[batch]) if batch < emissions.offsets[rank + 1] else 0
                slots[slot].append(list(range(num_picked, num_picked + size)))
                if size:
                    picked.append(emissions.starts[batch] + np.arange(size))
                num_picked += size
        position = epoch * self.order.epoch_size + int(emissions.step_starts[in_epoch])
        return self.assembler.assemble(step, position, emissions.draws.take(np.concatenate(picked)), slots)

    def _epoch_of(self, step: int) -> int:
        while self._first_steps[-1] <= step:
            epoch = len(self._first_steps) - 1
            self._first_steps.append(self._first_steps[epoch] + self._emissions(epoch).num_steps)
        return int(np.searchsorted(self._first_steps, step, side="right")) - 1

    def _emissions(self, epoch: int) -> Emissions:
        if self._latest is None or self._latest[0] != epoch:
            self._latest = (epoch, self._replay(epoch))
        return self._latest[1]

    def _replay(self, epoch: int) -> Emissions:
        count = self.order.epoch_size
        draws = self.order.window(epoch * count, count)
        buckets = self.assembler.table.shape_ids[draws.ids].astype(np.int64)
        draw_ranks = (epoch * count + np.arange(count)) % self.ranks
        queues = draw_ranks * len(self.batch_sizes) + buckets
        by_queue = np.argsort(queues, kind="stable")  # the draws of one rank and bucket side by side, in order
        in_queue = np.arange(count) - np.searchsorted(queues[by_queue], queues[by_queue])
        starts = np.flatnonzero(in_queue % self.batch_sizes[buckets[by_queue]] == 0)
        sizes = np.diff(starts, append=count)
        first_draw, last_draw = by_queue[starts], by_queue[starts + sizes - 1]
        is_full = sizes == self.batch_sizes[buckets[first_draw]]
        time = np.where(is_full, last_draw, count + buckets[first_draw])
        ranks = draw_ranks[first_draw]
        by_time = np.lexsort((time, ranks))
        offsets = np.concatenate(([0], np.cumsum(np.bincount(ranks, minlength=self.ranks))))
        steps = (np.arange(len(starts)) - offsets[ranks[by_time]]) // self.slots_per_step
        step_sizes = np.zeros(int(steps.max()) + 1, np.int64)
        np.add.at(step_sizes, steps, sizes[by_time])
        step_starts = np.concatenate(([0], np.cumsum(step_sizes)))
        return Emissions(draws.take(by_queue), starts[by_time], sizes[by_time], offsets, step_starts)
