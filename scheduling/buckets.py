"""Batch sizes of the paper's policies: one per bucket, from a memory limit and a compute limit."""

import math
from dataclasses import dataclass

import numpy as np

from adaptiveload.scheduling.cost import CostModel, IntArray
from adaptiveload.scheduling.metrics import load_cv, where_ranks_meet
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import Shape

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


def mean_batch_size(shape_counts: IntArray, batch_sizes: IntArray) -> float:
    """Mean samples of a micro-batch in the long run; both int64 [num shapes]."""
    return float(shape_counts.sum() / (shape_counts / batch_sizes).sum())


@dataclass(frozen=True, eq=False)
class Buckets:
    """The buckets of a data set under one memory limit and one exponent.

    Attributes:
        table: Samples.
        shape_counts: int64 [num shapes], training samples of each bucket.
        memory_limit_tokens: Most tokens of a micro-batch.
        text_memory_tokens: Tokens that take the memory of one sample's text.
        max_samples: Most samples of a micro-batch.
        cost_exponent: The paper's p.
    """

    table: SampleTable
    shape_counts: IntArray
    memory_limit_tokens: int
    text_memory_tokens: int
    max_samples: int
    cost_exponent: float

    def batch_sizes(self, factor: float) -> IntArray:
        """Batch size of every bucket under M_comp = factor * S_max ** p, int64 [num shapes]; infinite is no limit."""
        longest = int(self.table.shape_tokens[self.shape_counts > 0].max())
        limit = factor * math.pow(longest, self.cost_exponent)
        sizes = [self._batch_size(tokens, limit) for tokens in self.table.shape_tokens.tolist()]
        return np.minimum(np.array(sizes, np.int64), self.max_samples)

    def above_compute_limit(self, factor: float) -> list[Shape]:
        """Shapes in use of which even one sample breaks the compute limit; the paper's max(1, .) hides them."""
        longest = int(self.table.shape_tokens[self.shape_counts > 0].max())
        edge = longest * math.pow(factor, 1 / self.cost_exponent) * (1 + EDGE)
        return [
            shape
            for shape, tokens, count in zip(self.table.shapes, self.table.shape_tokens, self.shape_counts, strict=True)
            if count and tokens > edge
        ]

    def _batch_size(self, seq_len: int, limit: float) -> int:
        by_memory = bucket_batch_size(seq_len + self.text_memory_tokens, self.memory_limit_tokens)
        return min(by_memory, bucket_batch_size(seq_len, by_memory * seq_len, limit, self.cost_exponent))

    def curve(
        self, cost_model: CostModel, ranks: int, slots_per_step: int, meet: str
    ) -> dict[float, tuple[float, float]]:
        """Simulated tokens per second and rank, and load CV, at each factor of M_comp that is tried."""
        return {
            factor: simulated_rate(
                self.table, self.shape_counts, self.batch_sizes(factor), cost_model, ranks, slots_per_step, meet
            )
            for factor in COMPUTE_LIMIT_FACTORS
        }

    def best_factor(self, cost_model: CostModel, ranks: int, slots_per_step: int, meet: str) -> float:
        """The factor of the highest simulated tokens/s; of several the lowest that has room for the longest sample."""
        curve = self.curve(cost_model, ranks, slots_per_step, meet)
        return max(curve, key=lambda factor: (curve[factor][0], factor >= 1))


def simulated_rate(
    table: SampleTable,
    shape_counts: IntArray,
    batch_sizes: IntArray,
    cost_model: CostModel,
    ranks: int,
    slots_per_step: int,
    meet: str,
) -> tuple[float, float]:
    """Tokens per second and rank, and load CV, if ranks draw full micro-batches at random, as often as buckets fill.

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
    per_sample = cost_model.sample_us(tokens, np.zeros_like(tokens))
    costs = cost_model.micro_batch_us(per_sample * batch_sizes)[picked].reshape(SIMULATED_STEPS, slots_per_step, peers)
    work = np.concatenate([where_ranks_meet(step, meet) for step in costs])
    rate = float((tokens * batch_sizes)[picked].sum()) / peers / float(work.max(axis=1).sum()) * 1e6
    return rate, load_cv(work, "slot")
