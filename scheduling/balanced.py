"""The default policy: windows of N samples of the order, each planned as a whole over all ranks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from adaptiveload.scheduling.assemble import StepAssembler
from adaptiveload.scheduling.cost import IntArray
from adaptiveload.scheduling.order import Draws, EndlessOrder
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.planner import plan_step


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
        text_memory_tokens: Tokens that take the memory of one sample's text.
        lookahead: Windows K that are regrouped by length, see `regroup`.
    """

    assembler: StepAssembler
    order: EndlessOrder
    ranks: int
    samples_per_step: int
    memory_limit_tokens: int
    max_samples_per_micro_batch: int
    slot_overhead_us: int | None
    text_memory_tokens: int = 0
    lookahead: int = 1
    _groups: dict[int, list[Draws]] = field(default_factory=dict, compare=False)  # the latest group of windows alone

    @property
    def steps_in_first_epoch(self) -> int:
        """Whole windows in an epoch, at least 1."""
        return max(self.order.epoch_size // self.samples_per_step, 1)

    def plan(self, step: int) -> StepPlan:
        """Plan of optimizer step `step`, from 0."""
        draws = self.window(step)
        # A floor under a sample's memory is a ceiling on the samples of a micro-batch; an oversize sample runs alone.
        floor = -(-self.memory_limit_tokens // self.max_samples_per_micro_batch)
        tokens = self.assembler.table.num_tokens[draws.ids] + self.text_memory_tokens
        overhead_us = self.slot_overhead_us
        if overhead_us is None:
            overhead_us = round(self.assembler.costs.cost_at(step).a_us)
        plan = plan_step(
            self.assembler.sample_us(step, draws),
            np.clip(tokens, floor, self.memory_limit_tokens),
            self.ranks,
            self.memory_limit_tokens,
            meet=self.assembler.meet,
            slot_overhead_us=overhead_us,
            speed_permille=self.assembler.costs.speed_at(step, self.ranks),
        )
        return self.assembler.assemble(step, step * self.samples_per_step, draws, plan.slots)

    def window(self, step: int) -> Draws:
        """Draws of `step`; the same on any number of ranks."""
        size, group = self.samples_per_step, self.lookahead
        if group == 1:
            return self.order.window(step * size, size)
        first = step // group * group
        if first not in self._groups:
            draws = self.order.window(first * size, group * size)
            windows = regroup(self.assembler.table.num_tokens[draws.ids], group, f"{self.order.seed}\0{first}")
            self._groups.clear()
            self._groups[first] = [draws.take(window) for window in windows]
        return self._groups[first][step - first]


def regroup(num_tokens: IntArray, group: int, seed: str) -> list[IntArray]:
    """Indices of `group` windows of equal size such that each holds samples of like length, in seeded order.

    Dear samples then meet enough work of their own kind, which a window with a few of them lacks. Cost rises with
    length under any cost model, so lengths stand for costs: a refitted cost model or another number of ranks changes
    nothing. Within the group the length of steps varies widely, across groups it does not.

    Args:
        num_tokens: int64 [group * N], of the samples of `group` successive windows.
        group: Windows K.
        seed: Seed of the order of the new windows.
    """
    longest_first = np.argsort(-num_tokens, kind="stable")
    windows = [np.sort(part) for part in np.split(longest_first, group)]
    key = hashlib.blake2b(f"lookahead\0{seed}".encode(), digest_size=16).digest()
    shuffled = np.argsort(np.random.Philox(key=int.from_bytes(key, "little")).random_raw(group), kind="stable")
    return [windows[index] for index in shuffled.tolist()]


DEAREST_SAMPLES = 2  # work that a rank wants per step, in dearest samples: with less, ranks cannot be level


def enough_samples_per_step(costs: Sequence[int] | IntArray, ranks: int) -> int:
    """Smallest global batch that gives a rank work for twice the dearest sample in a step."""
    array = np.asarray(costs, np.int64)
    return -(-DEAREST_SAMPLES * int(array.max()) * ranks * len(array) // int(array.sum()))
