"""HSDP: every group of ranks holds a whole copy of the model and gathers it among itself.

Within a group ranks wait for each other in every slot; groups only wait for each other when they add up their
gradients, after the last slot. A step is planned as if all ranks met in every slot: then those of any group do. What is
left to choose is which micro-batches of a slot share a group.
"""

from collections.abc import Sequence

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
    """`slots` as those of `plan_step`, for `replicas` groups of consecutive ranks; none takes longer than of one group.

    Args:
        cost: Of the samples of the step.
        mem: Of the same samples.
        ranks: A multiple of `replicas`.
        replicas: Groups.
        mem_cap: As for `plan_step`.
        slot_overhead_us: As for `plan_step`.
        speed_permille: As for `plan_step`.
    """
    slots = plan_step(
        cost,
        mem,
        ranks,
        mem_cap,
        # A rank that shares its copy with none waits for none.
        meet="step" if replicas == ranks else "slot",
        slot_overhead_us=slot_overhead_us,
        speed_permille=speed_permille,
    ).slots
    # What was planned for a rank's speed stays there.
    return slots if replicas == ranks or speed_permille is not None else deal_to_groups(slots, cost, replicas)


def deal_to_groups(
    slots: Sequence[Sequence[list[int] | None]], cost: IntArray, replicas: int
) -> list[list[list[int] | None]]:
    """The same micro-batches in each slot: those of like cost share a group, the dearest go where most time is left.

    Args:
        slots: Of ranks of equal speed, `slots[g][r]`.
        cost: int64 [n], microseconds of the samples.
        replicas: Groups.
    """
    costs: list[int] = cost.tolist()
    size = len(slots[0]) // replicas
    dealt, totals = list[list[list[int] | None]](), [0] * replicas
    for slot in slots:
        loads = [sum(costs[sample] for sample in bin_ or ()) for bin_ in slot]
        falling = sorted(range(len(slot)), key=lambda bin_number: -loads[bin_number])
        row: list[list[int] | None] = [None] * len(slot)
        for place, group in enumerate(sorted(range(replicas), key=totals.__getitem__)):
            bins = falling[place * size : (place + 1) * size]
            row[group * size : (group + 1) * size] = [slot[bin_number] for bin_number in bins]
            totals[group] += loads[bins[0]]
        dealt.append(row)
    return dealt
