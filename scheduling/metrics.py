"""How evenly ranks are loaded: load CV, idle share and straggler, of planned microseconds and measured seconds alike.

`costs` is [G, R]: micro-batches of R ranks, 0 where a rank has none (only where ranks meet at the step).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


def where_ranks_meet(costs: ArrayLike, meet: str) -> FloatArray:
    """Work of each rank between two meetings, [meetings, R]: a slot's with `meet` "slot", the step's with "step".

    Rows of several steps may be stacked and given to the functions below with `meet` "slot".

    Raises:
        ValueError: If `meet` is unknown, or `costs` is not [G, R] of finite numbers >= 0 with at least one entry.
    """
    array: FloatArray = np.asarray(costs, np.float64)
    if array.ndim != 2 or not array.size or not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"costs must be a [slots, ranks] array of finite numbers >= 0, got shape {array.shape}")
    if meet == "slot":
        return array
    if meet == "step":
        totals: FloatArray = array.sum(axis=0, keepdims=True)
        return totals
    raise ValueError(f'meet must be "slot" or "step", got {meet!r}')


def load_cv(costs: ArrayLike, meet: str) -> float:
    """Standard deviation over mean across ranks where they meet, averaged over the meetings. All 0 counts as even."""
    work = where_ranks_meet(costs, meet)
    means = work.mean(axis=1)
    return float((work.std(axis=1) / np.where(means > 0, means, 1)).mean())


def idle_share(costs: ArrayLike, meet: str) -> float:
    """Share of rank time spent waiting: 1 - sum(mean over ranks) / sum(max over ranks) over the meetings."""
    work = where_ranks_meet(costs, meet)
    longest = float(work.max(axis=1).sum())
    return 1 - float(work.mean(axis=1).sum()) / longest if longest else 0.0


def straggler(costs: ArrayLike) -> int:
    """Rank with the most work in the step, the lowest of several."""
    return int(np.asarray(costs, np.float64).sum(axis=0).argmax())
