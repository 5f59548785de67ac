"""The default policy: windows of N samples of the order, each planned as a whole over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptiveload.scheduling.assemble import StepAssembler
from adaptiveload.scheduling.cost import IntArray
from adaptiveload.scheduling.metrics import step_time
from adaptiveload.scheduling.order import Draws, EndlessOrder
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.planner import plan_step
from adaptiveload.scheduling.recompute import ALL_BLOCKS
from adaptiveload.scheduling.replicas import plan_replicas


@dataclass(frozen=True)
class BalancedPolicy:
    """Step t runs window t of the order; only who computes what depends on the ranks.

    Attributes:
        assembler: Prices and assembles plans.
        order: Order of the training samples.
        ranks: Data-parallel ranks.
        samples_per_step: The window N.
        memory_limit_tokens: Most tokens of a micro-batch, unless one sample alone has more.
        max_samples_per_micro_batch: Most samples of a micro-batch.
        slot_overhead_us: Microseconds that one more micro-batch costs; None takes the cost model's fixed part.
    """

    assembler: StepAssembler
    order: EndlessOrder
    ranks: int
    samples_per_step: int
    memory_limit_tokens: int
    max_samples_per_micro_batch: int
    slot_overhead_us: int | None

    @property
    def steps_in_first_epoch(self) -> int:
        """Whole windows in an epoch, at least 1."""
        return max(self.order.epoch_size // self.samples_per_step, 1)

    def plan(self, step: int) -> StepPlan:
        """Plan of optimizer step `step`, from 0."""
        draws = self.order.window(step * self.samples_per_step, self.samples_per_step)
        assembler, recompute = self.assembler, self.assembler.recompute
        overhead_us = self.slot_overhead_us
        if overhead_us is None:
            overhead_us = round(assembler.costs.cost_at(step).a_us)
        plans = [self._plan(step, draws, assembler.limited_tokens(draws), self.memory_limit_tokens, overhead_us)]
        if recompute.level == "auto" and 0 < recompute.kept_tokens < self.memory_limit_tokens:
            # Fewer micro-batches that compute something again, or more that do not.
            plans.append(self._plan(step, draws, assembler.kept_tokens(draws), recompute.kept_tokens, overhead_us))
        beyond_us = max(overhead_us - round(assembler.costs.cost_at(step).a_us), 0)
        return min(plans, key=lambda plan: planned_us(plan) + beyond_us * plan.num_slots)

    def _plan(self, step: int, draws: Draws, tokens: IntArray, limit: int, overhead_us: int) -> StepPlan:
        """The plan whose micro-batches have at most `limit` of `tokens`, or a single sample."""
        assembler = self.assembler
        # A floor under a sample's memory is a ceiling on the samples of a micro-batch; an oversize sample runs alone.
        floor = -(-limit // self.max_samples_per_micro_batch)
        costs = assembler.sample_us(step, draws)
        if assembler.recompute.level == "auto":
            shares = assembler.recompute.permille(assembler.kept_tokens(draws))
            costs = costs + assembler.again_us(step, draws) * shares // ALL_BLOCKS
        mem, speed = np.clip(tokens, floor, limit), assembler.costs.speed_at(step, self.ranks)
        slots: list[list[list[int] | None]]
        if assembler.replicas > 1 and assembler.meet == "slot":
            slots = plan_replicas(
                costs,
                mem,
                self.ranks,
                assembler.replicas,
                limit,
                slot_overhead_us=overhead_us,
                speed_permille=speed,
            )
        else:
            slots = plan_step(
                costs,
                mem,
                self.ranks,
                limit,
                meet=assembler.meet,
                slot_overhead_us=overhead_us,
                speed_permille=speed,
            ).slots
        return assembler.assemble(step, step * self.samples_per_step, draws, slots)


def planned_us(plan: StepPlan) -> int:
    """Microseconds of a step as planned."""
    return int(step_time(plan.costs_us, plan.meet, plan.replicas))


DEAREST_SAMPLES = 2  # work that a rank wants per step, in dearest samples: with less, ranks cannot be level


def enough_samples_per_step(costs: Sequence[int] | IntArray, ranks: int) -> int:
    """Smallest global batch that gives a rank work for twice the dearest sample in a step."""
    array = np.asarray(costs, np.int64)
    return -(-DEAREST_SAMPLES * int(array.max()) * ranks * len(array) // int(array.sum()))
