"""Attention over packed samples: dense calls on samples of equal length, nothing padded, nothing masked.

Measured on an H200, dense cuDNN attention batched by equal length beats one variable-length call over all samples by
1.4 to 2.9 times at every length. But cuDNN plans each new (batch size, length) for 0.1 to 0.2 s, and where text joins
the sequence nearly every sample has a length of its own: those go into variable-length calls.

Legend: `B` samples of one length, `S` tokens of one sample, `N` = sum of S, `H` heads, `hd` head dim.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 (the name that PyTorch's own documentation uses)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from adaptiveload.kernels.segments import equal_runs
from adaptiveload.models.packing import to_device

logger = logging.getLogger(__name__)

# On Hopper cuDNN is 1.7 times as fast as flash attention; the rest serve what it cannot (float32, old GPUs).
CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


# Joint lengths that cuDNN plans for in a process: 0.3 s each, forward and backward, so 20 s of a run.
_MAX_JOINT_PLANS = 64


class AttentionBatch(NamedTuple):
    """One dense attention call."""

    batch_size: int
    query_len: int
    key_len: int

    @property
    def num_queries(self) -> int:
        """Rows of all its queries."""
        return self.batch_size * self.query_len

    @property
    def num_keys(self) -> int:
        """Rows of all its keys."""
        return self.batch_size * self.key_len


class VarlenBatch(NamedTuple):
    """One attention call over samples of any lengths, each to itself.

    Attributes:
        offsets: First row of each sample, and their number: int32 [B + 1], on the device.
        longest: Rows of the longest sample.
        num_queries: Rows of all samples.
    """

    offsets: torch.Tensor
    longest: int
    num_queries: int

    @property
    def num_keys(self) -> int:
        """As many as queries."""
        return self.num_queries


class JointPlans:
    """Which joint lengths are worth a plan of cuDNN: those that come again, while there is room.

    Nothing depends on it but speed and the last bits: a call is dense or variable-length for a whole micro-batch.

    Args:
        max_plans: Most shapes of dense calls.
    """

    def __init__(self, max_plans: int = _MAX_JOINT_PLANS) -> None:
        self.max_plans = max_plans
        self._seen: set[AttentionBatch] = set()
        self._planned: set[AttentionBatch] = set()

    def add(self, batch: AttentionBatch) -> None:
        """`batch` has been planned, whatever the room."""
        self._planned.add(batch)

    def split(self, batches: Sequence[AttentionBatch], device: torch.device) -> list[AttentionBatch | VarlenBatch]:
        """`batches`, those that are not worth a plan merged into variable-length calls, in order.

        Without gradients nothing is learned: evaluation and previews leave training as it is, to the last bit.
        """
        calls: list[AttentionBatch | VarlenBatch] = []
        for is_dense, run in groupby(batches, self._is_worth_a_plan):
            neighbours = list(run)
            calls += neighbours if is_dense else [_varlen(neighbours, device)]
        return calls

    def _is_worth_a_plan(self, batch: AttentionBatch) -> bool:
        if batch in self._planned:
            return True
        if not torch.is_grad_enabled():
            return False
        if len(self._planned) >= self.max_plans:
            return False
        if batch in self._seen:
            self._planned.add(batch)
            return True
        self._seen.add(batch)
        return False


JOINT_PLANS = JointPlans()


def joint_attention_calls(
    offsets: torch.Tensor, device: torch.device, dtype: torch.dtype, plans: JointPlans = JOINT_PLANS
) -> list[AttentionBatch | VarlenBatch]:
    """Calls for sequences of text and image together, whose lengths hardly repeat; dense ones where nothing plans.

    Args:
        offsets: First row of each sample, and their number: [B + 1], CPU.
        device: Where attention runs.
        dtype: Of queries, keys and values.
        plans: What has been planned so far.
    """
    batches = attention_batches(offsets)
    if device.type != "cuda" or not _has_varlen(dtype):
        return list(batches)
    return plans.split(batches, device)


@cache
def _has_varlen(dtype: torch.dtype) -> bool:
    """Whether variable-length attention runs on this GPU; says once if not."""
    if dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability() >= (8, 0):
        return True
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "joint attention in %s on %s: no variable-length kernel, one dense call for each length",
            dtype,
            torch.cuda.get_device_name(),
        )
    return False


def _varlen(batches: list[AttentionBatch], device: torch.device) -> VarlenBatch:
    lengths = [batch.query_len for batch in batches for _ in range(batch.batch_size)]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return VarlenBatch(to_device(offsets, device), max(lengths), sum(lengths))


@dataclass(frozen=True)
class AttentionCalls:
    """The dense calls of a micro-batch, in a shell that `torch.compile` does not look into.

    It would compile anew for every length of a bare list.
    """

    batches: list[AttentionBatch]

    @torch.compiler.disable
    def run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `packed_attention`."""
        return packed_attention(query, key, value, self.batches)


def attention_batches(seq_offsets: torch.Tensor, key_len: int | None = None) -> list[AttentionBatch]:
    """Dense calls that cover a packed batch, in order: samples of equal length, their number a power of two.

    cuDNN plans each new (batch size, length) for 0.1 to 0.2 s; with powers of two (13 = 8 + 4 + 1) few plans serve
    all micro-batches.

    Args:
        seq_offsets: First token of each sample, and N: [B + 1], CPU.
        key_len: Keys of every sample, for cross attention; None for self attention.
    """
    batches = []
    for count, seq_len in equal_runs(seq_offsets):
        sizes = [1 << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1]
        batches += [AttentionBatch(size, seq_len, seq_len if key_len is None else key_len) for size in sizes]
    return batches


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batches: Sequence[AttentionBatch | VarlenBatch]
) -> torch.Tensor:
    """Attention of each sample to its own keys.

    Args:
        query: [N, H, hd].
        key: [sum of keys, H, hd], samples in the order of `query`.
        value: As `key`.
        batches: From `attention_batches`.

    Returns:
        [N, H * hd].
    """
    # split, not slices: the backward of each slice would zero-fill a gradient of all N tokens.
    queries = query.split([batch.num_queries for batch in batches])
    keys, values = (tensor.split([batch.num_keys for batch in batches]) for tensor in (key, value))
    backends = sdpa_kernel(CUDA_BACKENDS, set_priority=True) if query.is_cuda else nullcontext()
    with backends:
        outputs = [_attention(*call) for call in zip(batches, queries, keys, values, strict=True)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attention(
    batch: AttentionBatch | VarlenBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """[rows, H, hd] each, as [rows, H * hd]."""
    if isinstance(batch, VarlenBatch):
        ends = (batch.offsets, batch.offsets, batch.longest, batch.longest)
        with _CONTEXT_OF_CALL.get()():
            output = varlen_attn(query, key, value, *ends)
        return output.flatten(1)
    dense = [tensor.unflatten(0, (batch.batch_size, -1)).transpose(1, 2) for tensor in (query, key, value)]
    with _CONTEXT_OF_CALL.get()():
        output = F.scaled_dot_product_attention(*dense)  # [B, H, S, hd]
    return output.transpose(1, 2).flatten(2).flatten(0, 1)


# What an attention kernel runs in while a checkpointed block runs, see `keep_attention`.
_CONTEXT_OF_CALL: ContextVar[Callable[[], AbstractContextManager[Any]]] = ContextVar("context", default=nullcontext)

# The kernels behind `packed_attention`, of which the last is the CPU's. Where none fits (float64), attention is made of
# plain products, and nothing of it is kept.
_KERNELS = (
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a checkpointed forward and of its recomputation: attention outputs are kept, and taken from there.

    They are two bytes a number beside the products that give them, of which attention's grow with the square of S.
    PyTorch's own contexts look at every operator, from Python; around a whole block they took longer than the block, so
    they stand around each attention kernel alone.
    """
    to_come: deque[AbstractContextManager[Any]] = deque()

    def keep() -> AbstractContextManager[Any]:
        keeping, taking = create_selective_checkpoint_contexts(list(_KERNELS))
        to_come.append(taking)
        return keeping

    return _around_calls(keep), _around_calls(to_come.popleft)


@contextmanager
def _around_calls(make_context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    token = _CONTEXT_OF_CALL.set(make_context)
    try:
        yield
    finally:
        _CONTEXT_OF_CALL.reset(token)
