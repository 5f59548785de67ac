"""HSDP: every group of ranks holds a whole copy of the model and gathers it among itself.

Within a group ranks wait for each other in every slot; groups only wait for each other when they add up their
gradients, after the last slot. So the samples of a step are split over the groups by cost, and each group is planned
apart.
"""

import numpy as np

from adaptiveload.scheduling.bins import IntArray
from adaptiveload.scheduling.planner import plan_step


def plan_replicas(
    cost: IntArray,
    mem: IntArray,
    ranks: int,
    replicas: int,
    mem_cap: int,
    *,
    slot_overhead_us: int,
    speed_permille: IntArray | None,
) -> list[list[list[int] | None]]:
    """`slots` as those of `plan_step` where ranks meet at every slot, for `replicas` groups of consecutive ranks.

    A rank has `None` where another group has more slots than its own.

    Args:
        cost: Of the samples of the step, at least as many as there are groups.
        mem: Of the same samples.
        ranks: A multiple of `replicas`.
        replicas: Groups.
        mem_cap: As for `plan_step`.
        slot_overhead_us: As for `plan_step`.
        speed_permille: As for `plan_step`; a group gets work by the sum of its ranks' speeds.
    """
    size = ranks // replicas
    speeds = np.full(ranks, 1000, np.int64) if speed_permille is None else speed_permille
    groups: list[list[list[list[int] | None]]] = []
    for number, samples in enumerate(split_by_cost(cost, speeds.reshape(replicas, size).sum(1))):
        if not len(samples):  # a group that is very slow
            groups.append([[[] for _ in range(size)]])
            continue
        plan = plan_step(
            cost[samples],
            mem[samples],
            size,
            mem_cap,
            meet="slot",
            slot_overhead_us=slot_overhead_us,
            speed_permille=None if speed_permille is None else speeds[number * size : (number + 1) * size],
        )
        names = samples.tolist()
        groups.append([[[names[i] for i in bin_ or ()] for bin_ in slot] for slot in plan.slots])
    absent: list[list[int] | None] = [None] * size
    return [
        [bin_ for group in groups for bin_ in (group[g] if g < len(group) else absent)]
        for g in range(max(len(group) for group in groups))
    ]


def split_by_cost(cost: IntArray, speed: IntArray) -> list[IntArray]:
    """Ascending indices of the samples of each part: dearest first to the part that would then be done soonest.

    Args:
        cost: int64 [n], positive.
        speed: int64 [parts], how fast each part works.
    """
    speeds: list[int] = speed.tolist()
    unit, loads = max(speeds), [0] * len(speeds)
    members: list[list[int]] = [[] for _ in speeds]
    costs: list[int] = cost.tolist()
    for sample in np.argsort(-cost, kind="stable").tolist():
        ends = [(load + costs[sample]) * unit // each for load, each in zip(loads, speeds, strict=True)]
        part = ends.index(min(ends))
        loads[part] += costs[sample]
        members[part].append(sample)
    return [np.array(sorted(part), np.int64) for part in members]
