"""`plan_step`: which samples form a micro-batch, and which micro-batches run at the same moment.

A pure function of integers: no float, random number or clock decides anything, so that every rank and a laptop come to
the same plan. Samples are handled as classes of equal cost and memory (`bins`). Where ranks meet at every slot, `peel`
plans; where they meet once a step, `totals`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adaptiveload.scheduling.bins import Classes, IntArray
from adaptiveload.scheduling.peel import SlotPlanner
from adaptiveload.scheduling.totals import EvenSlot, TotalsPlan

LAST_SLOTS = 3  # tried as the slot in which ranks meet; more gain under 0.1 %
Integers = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True)
class Plan:
    """Who computes what in one step.

    Attributes:
        slots: `slots[g][r]` is the g-th micro-batch of rank r as ascending indices of samples; `[]` has none, and
            `None` says that the rank has no g-th micro-batch (only where ranks meet at the step).
        levels: Largest load in each slot: microseconds at the speed of its rank, `slot_overhead_us` left out.
    """

    slots: list[list[list[int] | None]]
    levels: list[int]


def plan_step(
    cost: Integers,
    mem: Integers,
    ranks: int,
    mem_cap: int,
    *,
    meet: str = "slot",
    slot_overhead_us: int = 0,
    speed_permille: Integers | None = None,
    min_slots: int = 1,
) -> Plan:
    """Deal the samples of one step to ranks and micro-batches.

    Args:
        cost: Microseconds that each sample adds to its micro-batch, positive.
        mem: Memory of each sample, in tokens or bytes, positive.
        ranks: Ranks that share the work.
        mem_cap: Most memory of one micro-batch, in the unit of `mem`.
        meet: "slot": ranks wait for each other at every micro-batch, and each slot has exactly one per rank. "step":
            they wait in the backward of their last one, and may run different numbers of micro-batches.
        slot_overhead_us: Fixed microseconds of one more micro-batch.
        speed_permille: Speed of each rank in thousandths; a slow one gets less. None is 1000 for all.
        min_slots: Fewest micro-batches of a rank.

    Raises:
        ValueError: If a cost, memory, speed or count is not a positive integer, lengths differ, a sample is above
            `mem_cap`, or `meet` is unknown.
    """
    costs, mems = _positive("cost", cost), _positive("mem", mem)
    if len(costs) != len(mems):
        raise ValueError(f"{len(costs)} costs but {len(mems)} memory sizes")
    for name, value, least in (
        ("ranks", ranks, 1),
        ("mem_cap", mem_cap, 1),
        ("min_slots", min_slots, 1),
        ("slot_overhead_us", slot_overhead_us, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if int(mems.max()) > mem_cap:
        raise ValueError(f"sample {int(mems.argmax())} needs memory {int(mems.max())}, above mem_cap {mem_cap}")
    speed = None if speed_permille is None else _positive("speed_permille", speed_permille)
    if speed is not None and len(speed) != ranks:
        raise ValueError(f"{len(speed)} speeds for {ranks} ranks")
    classes = Classes.of(costs, mems)
    planner = SlotPlanner(classes, ranks, mem_cap, speed, min_slots)
    slots: list[list[list[int] | None]]
    if meet == "slot":
        slots = [list(slot) for slot in planner.best(costs, slot_overhead_us)]
    elif meet == "step":
        # None: a rank may be too slow to work as long as the others in a slot that all share.
        lasts: list[EvenSlot | None] = [*planner.even_slots(slot_overhead_us)[:LAST_SLOTS], None]
        plans = [TotalsPlan(classes, ranks, mem_cap, slot_overhead_us, speed, last) for last in lasts]
        slots = min(plans, key=lambda plan: plan.time_thirds_us).rows(costs, min_slots)
    else:
        raise ValueError(f'meet must be "slot" or "step", got {meet!r}')
    return Plan(slots, [_level(slot, costs, speed) for slot in slots])


def _positive(name: str, values: Integers) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or int(array.min()) < 1:
        raise ValueError(f"{name} must be a sequence of positive integers, got {values!r:.80}")
    return array.astype(np.int64)


def _level(slot: list[list[int] | None], costs: IntArray, speed_permille: IntArray | None) -> int:
    """Largest load of a slot, in microseconds on its rank."""
    members = [bin_ or [] for bin_ in slot]
    rank_of = np.repeat(np.arange(len(members)), [len(bin_) for bin_ in members])
    loads = np.zeros(len(members), np.int64)
    np.add.at(loads, rank_of, costs[[sample for bin_ in members for sample in bin_]])
    if speed_permille is not None:
        loads = -(-loads * 1000 // speed_permille)
    return int(loads.max())
