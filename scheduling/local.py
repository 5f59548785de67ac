"""Packing by one rank alone, from a queue, for streams without an index: no rank knows what the others hold."""

from collections.abc import Sequence


def pack_local(costs: Sequence[int], mems: Sequence[int], target: int, mem_cap: int) -> list[int]:
    """Indices of the queued samples that make the next micro-batch: the head, then by age what still fits.

    The head always goes, so a sample waits for at most as many packs as there are samples before it.

    Args:
        costs: Microseconds of the queued samples, oldest first.
        mems: Their memory.
        target: Cost that all ranks aim at.
        mem_cap: Most memory of a micro-batch; a head beyond it goes alone.

    Raises:
        ValueError: If the queue is empty, or lengths differ.
    """
    if not costs or len(costs) != len(mems):
        raise ValueError(f"a queue needs as many costs as memory sizes, and at least one: {len(costs)}, {len(mems)}")
    chosen, cost, mem = [0], costs[0], mems[0]
    for i in range(1, len(costs)):
        if cost + costs[i] <= target and mem + mems[i] <= mem_cap:
            chosen.append(i)
            cost, mem = cost + costs[i], mem + mems[i]
    return chosen
