"""The default policy: windows of N samples of the order, each planned as a whole over all ranks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaptiveload.scheduling.assemble import StepAssembler
from adaptiveload.scheduling.cost import IntArray
from adaptiveload.scheduling.order import Draws, EndlessOrder
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.planner import plan_step

LOOKAHEADS = (1, 2, 4, 8)


@dataclass(frozen=True)
class BalancedPolicy:
    """Step t runs window t of the order; only who computes what depends on the ranks. `plan` keeps no state.

    Attributes:
        assembler: Prices and assembles plans.
        order: Order of the training samples.
        ranks: Data-parallel ranks.
        samples_per_step: The window N.
        memory_limit_tokens: Most tokens of a micro-batch, unless one sample alone has more.
        max_samples_per_micro_batch: Most samples of a micro-batch.
        slot_overhead_us: Microseconds that one more micro-batch costs.
        lookahead: Windows K that are regrouped by length, see `regroup`.
    """

    assembler: StepAssembler
    order: EndlessOrder
    ranks: int
    samples_per_step: int
    memory_limit_tokens: int
    max_samples_per_micro_batch: int
    slot_overhead_us: int
    lookahead: int = 1

    @property
    def steps_in_first_epoch(self) -> int:
        """Whole windows in an epoch, at least 1."""
        return max(self.order.epoch_size // self.samples_per_step, 1)

    def plan(self, step: int) -> StepPlan:
        """Plan of optimizer step `step`, from 0."""
        draws = self.window(step)
        # A floor under a sample's memory is a ceiling on the samples of a micro-batch; an oversize sample runs alone.
        floor = -(-self.memory_limit_tokens // self.max_samples_per_micro_batch)
        tokens = self.assembler.table.num_tokens[draws.ids]
        plan = plan_step(
            self.assembler.sample_us(draws),
            np.clip(tokens, floor, self.memory_limit_tokens),
            self.ranks,
            self.memory_limit_tokens,
            meet=self.assembler.meet,
            slot_overhead_us=self.slot_overhead_us,
        )
        return self.assembler.assemble(step, step * self.samples_per_step, draws, plan.slots)

    def window(self, step: int) -> Draws:
        """Draws of `step`; the same on any number of ranks."""
        size, group = self.samples_per_step, self.lookahead
        if group == 1:
            return self.order.window(step * size, size)
        first = step // group * group
        draws = self.order.window(first * size, group * size)
        windows = regroup(self.assembler.table.num_tokens[draws.ids], group, f"{self.order.seed}\0{first}")
        return draws.take(windows[step - first])


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


def resolve_lookahead(costs: Sequence[int] | IntArray, samples_per_step: int, ranks: int) -> int:
    """Smallest lookahead of 1, 2, 4, 8 under which a rank has work for twice the dearest sample, 8 if none.

    To be asked once when a run starts, and kept: another lookahead is another order of samples.

    Args:
        costs: Microseconds of the training samples.
        samples_per_step: The global batch N.
        ranks: Data-parallel ranks.
    """
    array = np.asarray(costs, np.int64)
    total, dearest = int(array.sum()), int(array.max())
    for lookahead in LOOKAHEADS:
        if lookahead * samples_per_step * total >= 2 * dearest * ranks * len(array):
            return lookahead
    return LOOKAHEADS[-1]
