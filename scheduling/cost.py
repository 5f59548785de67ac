"""Cost models: planned microseconds of a micro-batch, and a prior from FLOPs before anything is measured.

Both forms split into a fixed part of a micro-batch and a part that adds up over its samples, because only an additive
cost can price a micro-batch of mixed shapes. Prices are integers, so that every machine plans alike.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from adaptiveload.scheduling.flops import ModelDims

IntArray = NDArray[np.int64]

AGAIN = 1 / 3  # of what forward and backward of the linear layers take, a second forward is one pass of three
_LINEAR_TOKENS = 1_024  # up to here attention is a small part of a sample


class CostModel(Protocol):
    """Prices samples and micro-batches in microseconds."""

    @property
    def a_us(self) -> float:
        """Fixed part of a micro-batch."""
        ...

    def sample_us(self, num_tokens: IntArray, text_len: IntArray | NDArray[np.int32]) -> IntArray:
        """int64 [n], what each sample adds to its micro-batch, at least 1."""
        ...

    def again_us(self, num_tokens: IntArray) -> IntArray:
        """int64 [n], what computing all blocks of each sample again adds, attention kept."""
        ...

    def micro_batch_us(self, sum_of_sample_us: IntArray) -> IntArray:
        """int64 [m], micro-batches whose samples add up to `sum_of_sample_us`."""
        ...


@dataclass(frozen=True)
class TwoTermCost:
    """max(launch_floor, a + sum over samples of (c0 + b1*S + b2*S^2)), all in microseconds.

    Attributes:
        launch_floor_us: A micro-batch takes at least this long, however short: kernels cannot be launched faster.
        a_us: Fixed part of a micro-batch.
        c0_us: Fixed part of a sample; it carries the text, which is padded to one length for every sample.
        b1_us: Per token.
        b2_us: Per token squared.
    """

    launch_floor_us: float
    a_us: float
    c0_us: float
    b1_us: float
    b2_us: float

    def __post_init__(self) -> None:
        _check_coefficients(self)

    def sample_us(self, num_tokens: IntArray, text_len: IntArray | NDArray[np.int32]) -> IntArray:
        """int64 [n], what each sample adds to its micro-batch, at least 1. Captions are padded, so theirs is in c0."""
        tokens = np.asarray(num_tokens, np.float64)
        return _whole_us(self.c0_us + self.b1_us * tokens + self.b2_us * tokens * tokens)

    def again_us(self, num_tokens: IntArray) -> IntArray:
        """int64 [n], what computing all blocks of each sample again adds: one pass of three, attention kept."""
        return _whole_us((self.c0_us + self.b1_us * np.asarray(num_tokens, np.float64)) * AGAIN)

    def micro_batch_us(self, sum_of_sample_us: IntArray) -> IntArray:
        """int64 [m], micro-batches whose samples add up to `sum_of_sample_us`; a filler of no sample adds up to 0."""
        return np.maximum(round(self.launch_floor_us), round(self.a_us) + np.asarray(sum_of_sample_us, np.int64))


@dataclass(frozen=True)
class PowerCost:
    """The paper's a + b*B*S^p in microseconds; over mixed shapes, a + sum of b*S^p.

    Attributes:
        a_us: Fixed part of a micro-batch.
        b_us: Microseconds per token ** exponent.
        exponent: The paper's p, 1 (linear) to 2 (attention alone).
    """

    a_us: float
    b_us: float
    exponent: float

    def __post_init__(self) -> None:
        _check_coefficients(self)

    def sample_us(self, num_tokens: IntArray, text_len: IntArray | NDArray[np.int32]) -> IntArray:
        """int64 [n], what each sample adds to its micro-batch, at least 1."""
        # Once per distinct length, in Python: numpy's vectorised power may differ in the last bit between machines.
        lengths, where = np.unique(np.asarray(num_tokens, np.int64), return_inverse=True)
        costs = np.array([self.b_us * math.pow(length, self.exponent) for length in lengths.tolist()])
        return _whole_us(costs)[where.reshape(-1)]

    def again_us(self, num_tokens: IntArray) -> IntArray:
        """int64 [n], a guess: the law does not tell attention, which is kept, from the rest."""
        tokens = np.asarray(num_tokens, np.int64)
        short = self.sample_us(np.minimum(tokens, _LINEAR_TOKENS), np.zeros_like(tokens)).astype(np.float64)
        return _whole_us(AGAIN * short * np.maximum(tokens / _LINEAR_TOKENS, 1))

    def micro_batch_us(self, sum_of_sample_us: IntArray) -> IntArray:
        """int64 [m], micro-batches whose samples add up to `sum_of_sample_us`."""
        return round(self.a_us) + np.asarray(sum_of_sample_us, np.int64)


@dataclass(frozen=True)
class TableCost:
    """Whole microseconds by length: what rank 0 sends to all ranks after a refit, so that every machine plans alike.

    Attributes:
        launch_floor_us: Least time of a micro-batch.
        a_us: Fixed part of a micro-batch.
        lengths: Tokens of a sample, rising.
        prices_us: What a sample of each length adds to its micro-batch.
        agains_us: What computing all its blocks again adds.
    """

    launch_floor_us: int
    a_us: int
    lengths: tuple[int, ...]
    prices_us: tuple[int, ...]
    agains_us: tuple[int, ...]

    @classmethod
    def of(cls, cost: CostModel, num_tokens: IntArray) -> "TableCost":
        """`cost` for samples of the lengths in `num_tokens`."""
        lengths = np.unique(num_tokens).astype(np.int64)
        floor = int(cost.micro_batch_us(np.zeros(1, np.int64))[0])
        prices = cost.sample_us(lengths, np.zeros_like(lengths))
        agains = cost.again_us(lengths)
        return cls(floor, round(cost.a_us), tuple(lengths.tolist()), tuple(prices.tolist()), tuple(agains.tolist()))

    def sample_us(self, num_tokens: IntArray, text_len: IntArray | NDArray[np.int32]) -> IntArray:
        """int64 [n], what each sample adds to its micro-batch; the length must be one of `lengths`."""
        where = np.searchsorted(self.lengths, num_tokens)
        return np.array(self.prices_us, np.int64)[where]

    def again_us(self, num_tokens: IntArray) -> IntArray:
        """int64 [n], what computing all blocks of each sample again adds."""
        return np.array(self.agains_us, np.int64)[np.searchsorted(self.lengths, num_tokens)]

    def micro_batch_us(self, sum_of_sample_us: IntArray) -> IntArray:
        """int64 [m], micro-batches whose samples add up to `sum_of_sample_us`."""
        return np.maximum(self.launch_floor_us, self.a_us + np.asarray(sum_of_sample_us, np.int64))


def _check_coefficients(cost: TwoTermCost | PowerCost) -> None:
    for name, value in vars(cost).items():
        if not (np.isfinite(value) and value >= 0):
            raise ValueError(f"cost model: {name} must be a number >= 0, got {value}")


def _whole_us(costs: NDArray[np.float64]) -> IntArray:
    return np.maximum(np.rint(costs).astype(np.int64), 1)


# Sustained TFLOP/s in training: (matrix products, attention), bf16 on GPUs. h200 is what a least-squares fit of Wan
# 1.3B steps measured there comes to; the others are scaled by their peak bf16 rate. cpu is one core, fp32, a guess.
GPU_TFLOPS = {
    "h200": (450.0, 500.0),
    "h100": (450.0, 500.0),
    "a100": (142.0, 158.0),
    "l40s": (165.0, 183.0),
    "cpu": (0.03, 0.02),
}
# Forward, backward and, under full recompute, forward again: linear layers take 2 forwards to go back, flash
# attention 2.5 (it recomputes the scores). "auto" adds `again_us` to what computes nothing again.
PASSES = {"none": (3.0, 3.5), "full": (4.0, 4.5), "attention": (4.0, 3.5), "auto": (3.0, 3.5)}
BLOCK_US = 1_200.0  # fixed microseconds per block and micro-batch: launches; with the next line it gives 0.06 s for
PARAMETER_US = 0.018e-3  # 1.3B and 0.3 s for 14B, what FSDP steps of short samples take; per parameter: its gathers


def analytic_prior(dims: ModelDims, gpu: str, recompute: str) -> TwoTermCost:
    """Cost model from FLOPs and the named GPU's sustained rates, to plan with before a benchmark is there.

    Args:
        dims: Sizes of the transformer.
        gpu: A key of `GPU_TFLOPS`.
        recompute: "none", "full" or "auto".

    Raises:
        ValueError: If `gpu` or `recompute` is unknown.
    """
    if gpu not in GPU_TFLOPS:
        raise ValueError(f"no rates for GPU {gpu!r}; known: {', '.join(GPU_TFLOPS)}")
    if recompute not in PASSES:
        raise ValueError(f"recompute must be one of {', '.join(PASSES)}, got {recompute!r}")
    matmul_per_us, attention_per_us = (tflops * 1e6 for tflops in GPU_TFLOPS[gpu])
    linear_passes, attention_passes = PASSES[recompute]
    fixed_us = BLOCK_US * dims.num_layers + PARAMETER_US * dims.num_parameters
    return TwoTermCost(
        launch_floor_us=fixed_us,
        a_us=fixed_us,
        c0_us=linear_passes * dims.sample_flops / matmul_per_us,
        b1_us=linear_passes * dims.linear_flops_per_token / matmul_per_us,
        b2_us=attention_passes * dims.attention_flops_per_token_squared / attention_per_us,
    )
