"""Where ranks meet once a step: gathers meet in a rank's first micro-batch and reduces in its last.

So the first micro-batches of all ranks should cost nearly the same, and so should the last. Totals are even already;
here each rank only reorders its micro-batches and moves samples between them.
"""

import numpy as np

from adaptiveload.scheduling.bins import IntArray

CANDIDATES = 64  # costs tried as the common one; finer changes the spread by little
NEAR = 50  # 1/50 of the common cost is near enough: the noise of a step is larger
Queue = list[list[int]]


def align_ends(
    queues: list[Queue], cost: IntArray, mem: IntArray, mem_cap: int, speed_permille: IntArray | None
) -> None:
    """Reorder and regroup the micro-batches of each rank, in place, for first and last ones of near-equal cost.

    Args:
        queues: Micro-batches of each rank, at least one.
        cost: int64 [n], microseconds of each sample.
        mem: int64 [n], memory of each sample.
        mem_cap: Most memory of a micro-batch.
        speed_permille: int64 [ranks], or None.
    """
    costs, mems = cost.tolist(), mem.tolist()
    speeds = [1000] * len(queues) if speed_permille is None else speed_permille.tolist()
    for queue in queues:
        queue.sort(key=lambda members: (-sum(costs[i] for i in members), members))
    # The last one is chosen first: its backward meets, two to three times as long as the forward of the first.
    last, aim = _choose(queues, costs, speeds)
    for rank, queue in enumerate(queues):
        queue.append(queue.pop(last[rank]))
        if len(queue) > 1:
            _approach(aim * speeds[rank] // 1000, queue[-1], queue[:-1], costs, mems, mem_cap)
    # A rank with a single micro-batch meets with it at both ends.
    first, aim = _choose([queue[:-1] or queue for queue in queues], costs, speeds)
    for rank, queue in enumerate(queues):
        queue.insert(0, queue.pop(first[rank]))
        if len(queue) > 2:
            _approach(aim * speeds[rank] // 1000, queue[0], queue[1:-1], costs, mems, mem_cap)
        for members in queue:
            members.sort()


def _choose(queues: list[Queue], costs: list[int], speeds: list[int]) -> tuple[list[int], int]:
    """One micro-batch of each rank such that ranks wait least for the dearest, and the mean cost of those."""
    loads = np.full((max(len(queue) for queue in queues), len(queues)), -1, np.int64)
    for rank, queue in enumerate(queues):
        loads[: len(queue), rank] = [sum(costs[i] for i in members) * 1000 // speeds[rank] for members in queue]
    values = np.unique(loads[loads >= 0])
    aims = values[np.unique(np.arange(CANDIDATES) * (len(values) - 1) // (CANDIDATES - 1))]
    best, best_wait, best_mean = np.zeros(len(queues), np.int64), -1, 0
    for aim in aims.tolist():
        distance = np.where(loads < 0, np.iinfo(np.int64).max, np.abs(loads - aim))
        chosen = distance.argmin(axis=0)
        picked = np.take_along_axis(loads, chosen[None], axis=0)[0]
        wait = int(picked.max()) * len(picked) - int(picked.sum())
        if best_wait < 0 or wait < best_wait:
            best, best_wait, best_mean = chosen, wait, int(picked.sum()) // len(picked)
    return best.tolist(), best_mean


def _approach(aim: int, end: list[int], others: Queue, costs: list[int], mems: list[int], mem_cap: int) -> None:
    """Move samples between `end` and `others` while that brings the cost of `end` nearer to `aim`, dearest first."""
    gap = aim - sum(costs[i] for i in end)
    if abs(gap) * NEAR <= aim:
        return
    rooms = [mem_cap - sum(mems[i] for i in other) for other in others]
    if gap < 0:
        for sample in sorted(end, key=lambda i: (-costs[i], i)):
            if costs[sample] <= -gap and len(end) > 1:
                for index, room in enumerate(rooms):
                    if mems[sample] <= room:
                        end.remove(sample)
                        others[index].append(sample)
                        rooms[index] -= mems[sample]
                        gap += costs[sample]
                        break
        return
    room = mem_cap - sum(mems[i] for i in end)
    candidates = [(-costs[i], i, other) for other in others for i in other if costs[i] <= gap and mems[i] <= room]
    for _, sample, other in sorted(candidates, key=lambda candidate: candidate[:2]):
        if costs[sample] <= gap and mems[sample] <= room and len(other) > 1:
            other.remove(sample)
            end.append(sample)
            gap -= costs[sample]
            room -= mems[sample]
