"""How evenly ranks are loaded: load CV, idle share and straggler, of planned microseconds and measured seconds alike.

`costs` is [G, R]: micro-batches of R ranks, 0 where a rank has none. With `replicas`, groups of consecutive ranks, the
ranks of a group meet in every slot (with `meet` "slot") and the groups at the end of the step.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


# Of a micro-batch's time its backward takes two parts in three (three in four where all blocks are computed again).
BACKWARD_PARTS, ALL_PARTS = 2, 3


def where_ranks_meet(costs: ArrayLike, meet: str, replicas: int = 1) -> FloatArray:
    """Work of each rank between two meetings, [meetings, R].

    With `meet` "slot" a meeting is a slot. With "step" ranks run on their own until the backward of their last
    micro-batch, in which every block waits for the gradients of all: two meetings, its begin and its end.

    Rows of several steps may be stacked and given to the functions below with `meet` "slot". With replicas the meetings
    of slots are those within groups, [meetings, R / replicas].

    Raises:
        ValueError: If `meet` is unknown, or `costs` is not [G, R] of finite numbers >= 0 with at least one entry.
    """
    array: FloatArray = np.asarray(costs, np.float64)
    if array.ndim != 2 or not array.size or not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"costs must be a [slots, ranks] array of finite numbers >= 0, got shape {array.shape}")
    if meet == "slot":
        rows: FloatArray = array.reshape(len(array) * replicas, -1)
        return rows[rows.any(axis=1)] if replicas > 1 and rows.any() else rows
    if meet == "step":
        last = last_of_each_rank(array)
        backward = np.take_along_axis(array, last[None], axis=0)[0] * BACKWARD_PARTS / ALL_PARTS
        return np.stack([array.sum(axis=0) - backward, backward])
    raise ValueError(f'meet must be "slot" or "step", got {meet!r}')


def last_of_each_rank(costs: ArrayLike) -> NDArray[np.int64]:
    """Number of the last micro-batch of each rank, int64 [R]; of ranks that have none that of the last row."""
    array = np.asarray(costs, np.float64)
    last: NDArray[np.int64] = len(array) - 1 - np.argmax(array[::-1] > 0, axis=0)
    return last


def load_cv(costs: ArrayLike, meet: str, replicas: int = 1) -> float:
    """Standard deviation over mean across ranks where they meet, averaged over the meetings. All 0 counts as even."""
    work = where_ranks_meet(costs, meet, replicas)
    means = work.mean(axis=1)
    return float((work.std(axis=1) / np.where(means > 0, means, 1)).mean())


def step_time_cv(seconds: ArrayLike) -> float:
    """Standard deviation over mean across ranks of the whole step's work [G, R], wherever they meet.

    All 0 counts as even. Raises ValueError as `where_ranks_meet` does.
    """
    return load_cv(np.asarray(seconds, np.float64).sum(axis=0, keepdims=True), "slot")


def idle_share(costs: ArrayLike, meet: str, replicas: int = 1) -> float:
    """Share of rank time spent waiting: 1 - work of all ranks / (ranks * time of the step)."""
    work: FloatArray = np.asarray(costs, np.float64)
    longest = step_time(costs, meet, replicas)
    return 1 - float(work.mean(axis=1).sum()) / longest if longest else 0.0


def step_time(costs: ArrayLike, meet: str, replicas: int = 1) -> float:
    """When the last rank is done: the sum over meetings of the longest work; of the slowest group, with replicas."""
    if meet == "slot" and replicas > 1:
        groups = np.split(np.asarray(costs, np.float64), replicas, axis=1)
        return max(step_time(group, meet) for group in groups)
    return float(where_ranks_meet(costs, meet).max(axis=1).sum())


def straggler(costs: ArrayLike) -> int:
    """Rank with the most work in the step, the lowest of several."""
    return int(np.asarray(costs, np.float64).sum(axis=0).argmax())
