"""Batch sizes of the paper's policies: one per bucket, from a memory limit and a compute limit."""

import math

import numpy as np
from numpy.typing import NDArray

from adaptiveload.scheduling.cost import CostModel, IntArray
from adaptiveload.scheduling.metrics import where_ranks_meet
from adaptiveload.scheduling.samples import SampleTable

COMPUTE_LIMIT_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
EDGE = 1e-9  # relative; a quotient this near a whole number is that number, since S ** p carries rounding errors
SIMULATED_STEPS = 1024  # tokens/s of a factor is then known to about 0.3 %
SIMULATED_RANKS = 64  # ranks draw alike and alone: more of them only draw the maximum a little further out


def bucket_batch_size(
    seq_len: int, memory_limit_tokens: int, compute_limit: float = math.inf, cost_exponent: float = 1.0
) -> int:
    """Largest batch size that both limits allow for samples of `seq_len` tokens, and at least 1.

    AdaptiveLoad, section 2A: max(1, min(M_mem // S, M_comp // S**p)). A sample above the memory limit gets 1 as well:
    refusing it is the caller's part (`build_policy`).

    Args:
        seq_len: Tokens in one sample, after patchifying, text not included.
        memory_limit_tokens: Tokens that fit in one rank's micro-batch.
        compute_limit: Upper bound of batch_size * seq_len ** cost_exponent, in tokens ** cost_exponent; infinite for
            the equal-token rule.
        cost_exponent: Fitted growth of step time with sequence length; 1 is linear, 2 is pure attention.

    Raises:
        ValueError: If `seq_len`, a limit or the exponent is not positive.
    """
    for name, value in (
        ("seq_len", seq_len),
        ("memory_limit_tokens", memory_limit_tokens),
        ("compute_limit", compute_limit),
        ("cost_exponent", cost_exponent),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    by_memory = memory_limit_tokens // seq_len
    if math.isinf(compute_limit):
        return max(1, by_memory)
    quotient = compute_limit / math.pow(seq_len, cost_exponent)
    nearest = round(quotient)
    by_compute = nearest if abs(quotient - nearest) <= EDGE * quotient else math.floor(quotient)
    return max(1, min(by_memory, by_compute))


def bucket_batch_sizes(
    shape_tokens: IntArray, memory_limit_tokens: int, max_samples: int, compute_limit: float, cost_exponent: float
) -> IntArray:
    """`bucket_batch_size` of every bucket, at most `max_samples`, int64 [num shapes]."""
    sizes = [
        bucket_batch_size(tokens, memory_limit_tokens, compute_limit, cost_exponent) for tokens in shape_tokens.tolist()
    ]
    return np.minimum(np.array(sizes, np.int64), max_samples)


def mean_batch_size(shape_counts: IntArray, batch_sizes: IntArray) -> float:
    """Mean samples of a micro-batch in the long run; both int64 [num shapes]."""
    return float(shape_counts.sum() / (shape_counts / batch_sizes).sum())


def simulated_tokens_per_s(
    table: SampleTable,
    shape_counts: IntArray,
    batch_sizes: IntArray,
    cost_model: CostModel,
    ranks: int,
    slots_per_step: int,
    meet: str,
) -> float:
    """Tokens per second and rank if every rank draws full micro-batches at random, as often as its buckets fill.

    Args:
        table: Samples.
        shape_counts: int64 [num shapes], training samples of each bucket.
        batch_sizes: int64 [num shapes].
        cost_model: Prices micro-batches.
        ranks: Data-parallel ranks; at most `SIMULATED_RANKS` are simulated.
        slots_per_step: Micro-batches of a rank in a step.
        meet: "slot" or "step".
    """
    rates = shape_counts / batch_sizes
    edges = np.cumsum(rates) / rates.sum()
    peers = min(ranks, SIMULATED_RANKS)
    raw = np.random.Philox(key=0).random_raw(SIMULATED_STEPS * slots_per_step * peers)
    picked = np.minimum(np.searchsorted(edges, (raw >> np.uint64(11)) / 2.0**53, side="right"), len(edges) - 1)
    tokens = table.shape_tokens
    per_sample = cost_model.sample_us(tokens, np.full(len(tokens), int(table.text_len.mean())))
    costs = cost_model.micro_batch_us(per_sample * batch_sizes)[picked].reshape(SIMULATED_STEPS, slots_per_step, peers)
    wall_us = sum(float(where_ranks_meet(step, meet).max(axis=1).sum()) for step in costs)
    return float((tokens * batch_sizes)[picked].sum()) / peers / wall_us * 1e6


def best_compute_limit_factor(
    table: SampleTable,
    shape_counts: IntArray,
    memory_limit_tokens: int,
    max_samples: int,
    cost_exponent: float,
    cost_model: CostModel,
    ranks: int,
    slots_per_step: int,
    meet: str,
) -> float:
    """The factor f of `COMPUTE_LIMIT_FACTORS` with the highest simulated tokens/s, the lowest of several."""

    def rate(factor: float) -> float:
        limit = compute_limit(table.shape_tokens, shape_counts, factor, cost_exponent)
        sizes = bucket_batch_sizes(table.shape_tokens, memory_limit_tokens, max_samples, limit, cost_exponent)
        return simulated_tokens_per_s(table, shape_counts, sizes, cost_model, ranks, slots_per_step, meet)

    return max(COMPUTE_LIMIT_FACTORS, key=rate)


def compute_limit(shape_tokens: IntArray, shape_counts: IntArray, factor: float, cost_exponent: float) -> float:
    """M_comp = f * S_max ** p over the buckets that have samples, in tokens ** p."""
    longest: NDArray[np.int64] = shape_tokens[shape_counts > 0]
    return factor * math.pow(int(longest.max()), cost_exponent)
