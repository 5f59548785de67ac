"""From draws and micro-batches to a `StepPlan`: prices, tokens, loss weights. All policies end here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adaptiveload.scheduling.cost import IntArray
from adaptiveload.scheduling.order import Draws
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.recompute import ALL_BLOCKS, Recompute
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.updates import CostHistory


@dataclass(frozen=True)
class StepAssembler:
    """Makes the `StepPlan` of one run's steps.

    Attributes:
        table: Samples that draws refer to.
        costs: Prices samples and micro-batches, step by step.
        meet: "slot" or "step".
        recompute: How much of a micro-batch is computed again.
        loss_weight_exponent: alpha in w_i = S_i ** alpha.
        text_memory_tokens: Tokens that the memory limit counts for one sample's text.
        replicas: Groups of ranks that hold a copy of the model each.
    """

    table: SampleTable
    costs: CostHistory
    meet: str
    recompute: Recompute
    loss_weight_exponent: float
    text_memory_tokens: int = 0
    replicas: int = 1

    def sample_us(self, step: int, draws: Draws) -> IntArray:
        """Microseconds that each draw adds to its micro-batch in `step` if all is kept, int64 [n]."""
        return self.costs.cost_at(step).sample_us(self.table.computed_tokens(draws.ids), self.table.text_len[draws.ids])

    def again_us(self, step: int, draws: Draws) -> IntArray:
        """Microseconds that computing all blocks of each draw again takes in `step`, int64 [n]."""
        return self.costs.cost_at(step).again_us(self.table.computed_tokens(draws.ids))

    def limited_tokens(self, draws: Draws) -> IntArray:
        """Tokens of each draw as the memory limit counts them, int64 [n]."""
        return self.table.computed_tokens(draws.ids) + self.text_memory_tokens

    def kept_tokens(self, draws: Draws) -> IntArray:
        """Tokens of each draw as recompute counts them: its text takes memory whatever the limit says, int64 [n]."""
        return self.table.computed_tokens(draws.ids) + self.recompute.text_tokens

    def weights(self, draws: Draws) -> NDArray[np.float64]:
        """Loss weight of each draw, float64 [n]."""
        # Once per distinct length, in Python: numpy's vectorised power may differ in the last bit between machines.
        lengths, where = np.unique(self.table.num_tokens[draws.ids], return_inverse=True)
        weights = np.array([math.pow(length, self.loss_weight_exponent) for length in lengths.tolist()])
        return weights[where.reshape(-1)]

    def assemble(
        self, step: int, position: int, draws: Draws, slots: Sequence[Sequence[Sequence[int] | None]]
    ) -> StepPlan:
        """Plan of `step`, which starts at `position` and consumes `draws`; `slots` holds indices of draws."""
        plan_slots = tuple(tuple(None if bin_ is None else tuple(bin_) for bin_ in slot) for slot in slots)
        flat = [bin_ for slot in plan_slots for bin_ in slot]
        shape = (len(plan_slots), len(plan_slots[0]))
        is_absent = np.array([bin_ is None for bin_ in flat]).reshape(shape)
        recomputed = self.recompute.permille(_sums(self.kept_tokens(draws), flat))
        sums = _sums(self.sample_us(step, draws), flat)
        if self.recompute.level == "auto":  # the cost of "full" is in the law
            sums += _sums(self.again_us(step, draws), flat) * recomputed // ALL_BLOCKS
        costs = self.costs.cost_at(step).micro_batch_us(sums).reshape(shape)
        if (speed := self.costs.speed_at(step, shape[1])) is not None:
            costs = -(-costs * 1000 // speed)
        weights = self.weights(draws)
        return StepPlan(
            step=step,
            position=position,
            next_position=position + len(draws),
            sample_ids=draws.ids,
            epochs=draws.epochs,
            repeats=draws.repeats,
            weights=weights,
            slots=plan_slots,
            costs_us=np.where(is_absent, 0, costs),
            num_tokens=_sums(self.table.num_tokens[draws.ids], flat).reshape(shape),
            recompute=self.recompute.block_level,
            recomputed=np.where(is_absent, 0, recomputed.reshape(shape)),
            normalizer=math.fsum(weights.tolist()),  # exact, so the order of the draws does not matter
            meet=self.meet,
            replicas=self.replicas,
        )


def _sums(values: IntArray, bins: Sequence[Sequence[int] | None]) -> IntArray:
    """Sum of `values` over each of `bins`, int64 [bins]; 0 for an empty one."""
    flat = np.array([index for bin_ in bins for index in bin_ or ()], np.int64)
    ends = np.cumsum([len(bin_ or ()) for bin_ in bins])
    running = np.concatenate(([0], np.cumsum(values[flat])))
    sums: IntArray = np.diff(running[ends], prepend=0)
    return sums
