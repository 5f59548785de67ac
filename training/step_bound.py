"""The bound of a training step: what the blocks' work takes at the measured rates of the best library kernels.

Counted, without recompute, for B samples of S tokens (N = B*S rows, M = B*T text rows, hidden D, inner F):

- every matrix product of the blocks three times, forward, input gradient and weight gradient, at the rate that
  `torch.mm` reaches at that very shape;
- attention forward and backward in dense calls at that (B, S), cross attention too;
- the bytes that memory-bound ops cannot avoid, at the measured bandwidth of a copy. For an element, r being the bytes
  of the residual stream (4 or 2) and activations having 2:
  - residual, norm and modulation in one: forward reads x, y and writes x, h (2r + 4); backward reads dh, dx, x and,
    where there is a gate, y, and writes dx, dy (3r + 6, ungated 3r + 4);
  - norm of queries or keys, and rotary: forward reads and writes (4), backward reads gradient and input, writes (6);
  - GELU: the same.
  A block of Wan has three of the first (one ungated); queries and keys of N rows, queries of N and keys of M rows of
  the cross attention; and a GELU of N*F. A block of the MMDiT has per stream two of the first, queries, keys, a GELU.

Not counted: biases and their gradients (libraries add them in the product's epilogue), sums of the gradients of q, k
and v (one product could give them), embeddings, modulation tables, head, loss and collectives. So it is a bound on the
blocks; a step cannot reach it, and how near it comes says what is left to gain.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from adaptiveload.models.attention import AttentionBatch, packed_attention
from adaptiveload.models.config import ModelConfig
from adaptiveload.models.mmdit import MLP_RATIO
from adaptiveload.models.wan import WanConfig

ENOUGH_MS = 3.0  # a timed run of short kernels repeats them for so long, so that launches do not count
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Matmul:
    """[rows, inputs] times [inputs, outputs], so often in a block."""

    rows: int
    inputs: int
    outputs: int
    count: int

    @property
    def flops(self) -> int:
        """Of one of its three products."""
        return 2 * self.rows * self.inputs * self.outputs


@dataclass(frozen=True)
class BlockWork:
    """Work of one block, forward and backward.

    Attributes:
        matmuls: Its matrix products.
        attention: Its dense attention calls.
        bytes_moved: Of its memory-bound ops.
    """

    matmuls: tuple[Matmul, ...]
    attention: tuple[AttentionBatch, ...]
    bytes_moved: int


@dataclass(frozen=True)
class Bound:
    """Milliseconds of all blocks at measured rates.

    Attributes:
        matmul_ms, attention_ms, memory_ms: Its three parts.
        rates: Measured rates, for a reader: TFLOP/s by op and shape, and the copy's GB/s.
    """

    matmul_ms: float
    attention_ms: float
    memory_ms: float
    rates: dict[str, float]

    @property
    def ms(self) -> float:
        """All of it."""
        return self.matmul_ms + self.attention_ms + self.memory_ms


def block_work(model: ModelConfig, batch_size: int, seq_len: int) -> BlockWork:
    """What a block of `model` has to do for `batch_size` samples of `seq_len` tokens; see the module's docstring."""
    size, rows, text_rows = model.hidden_size, batch_size * seq_len, batch_size * model.text_len
    r = 4 if model.residual_fp32 else 2
    gated, ungated, norm_rotary, gelu = (2 * r + 4) + (3 * r + 6), (2 * r + 4) + (3 * r + 4), 4 + 6, 4 + 6
    if isinstance(model, WanConfig):
        inner = model.ffn_dim
        products = [(rows, size, size, 6), (text_rows, size, size, 2), (rows, size, inner, 1), (rows, inner, size, 1)]
        calls = ((seq_len, seq_len), (seq_len, model.text_len))
        moved = rows * (size * (2 * gated + ungated + 3 * norm_rotary) + inner * gelu) + text_rows * size * norm_rotary
    else:
        inner = MLP_RATIO * size
        products = [
            (of_stream, *product)
            for of_stream in (rows, text_rows)
            for product in ((size, size, 4), (size, inner, 1), (inner, size, 1))
        ]
        calls = ((seq_len + model.text_len, seq_len + model.text_len),)
        moved = (rows + text_rows) * (size * (2 * gated + 2 * norm_rotary) + inner * gelu)
    attention = tuple(AttentionBatch(batch_size, *lengths) for lengths in calls)
    return BlockWork(tuple(Matmul(*product) for product in products), attention, moved)


def attention_flops(call: AttentionBatch, size: int) -> tuple[int, int]:
    """FLOPs of a dense call forward and backward, the scores of its backward computed again."""
    forward = 4 * call.batch_size * call.query_len * call.key_len * size
    return forward, forward * 5 // 2


def measure_bound(model: ModelConfig, batch_size: int, seq_len: int, device: torch.device, dtype: torch.dtype) -> Bound:
    """The bound of all blocks of `model`, its rates measured here and now."""
    work = block_work(model, batch_size, seq_len)
    rates: dict[str, float] = {}
    matmul_ms = attention_ms = 0.0
    for product in work.matmuls:
        taken = measure_matmul(product, device, dtype)
        matmul_ms += product.count * sum(taken.values())
        name = f"mm {product.rows}x{product.inputs}x{product.outputs}"
        rates |= {f"{name} {part}": product.flops / ms / 1e9 for part, ms in taken.items()}
    heads = (model.num_attention_heads, model.attention_head_dim)
    for call in work.attention:
        both = measure_attention(call, heads, device, dtype)
        attention_ms += sum(both)
        name = f"attention {call.batch_size}x{call.query_len}x{call.key_len}"
        for part, ms, flops in zip(
            ("forward", "backward"), both, attention_flops(call, model.hidden_size), strict=True
        ):
            rates[f"{name} {part}"] = flops / ms / 1e9
    bandwidth = measure_copy(device)
    rates["copy GB/s"] = bandwidth / 1e9
    layers = model.num_layers
    memory_ms = work.bytes_moved / bandwidth * 1e3
    return Bound(layers * matmul_ms, layers * attention_ms, layers * memory_ms, rates)


def measure_matmul(product: Matmul, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of a linear layer's forward, input gradient and weight gradient."""
    x = torch.randn(product.rows, product.inputs, device=device, dtype=dtype)
    weight = torch.randn(product.outputs, product.inputs, device=device, dtype=dtype)
    gradient = torch.randn(product.rows, product.outputs, device=device, dtype=dtype)
    return {
        "forward": median_ms(lambda: torch.mm(x, weight.t()), device),
        "input gradient": median_ms(lambda: torch.mm(gradient, weight), device),
        "weight gradient": median_ms(lambda: torch.mm(gradient.t(), x), device),
    }


def measure_attention(
    call: AttentionBatch, heads: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Milliseconds of the call forward and backward; `heads` is their number and their size."""
    tensors = [
        torch.randn(rows, *heads, device=device, dtype=dtype, requires_grad=True)
        for rows in (call.num_queries, call.num_keys, call.num_keys)
    ]

    def forward() -> torch.Tensor:
        return packed_attention(*tensors, [call])

    output = forward()
    gradient = torch.randn_like(output)
    backward_ms = median_ms(lambda: torch.autograd.grad(output, tensors, gradient, retain_graph=True), device)
    return median_ms(forward, device), backward_ms


def measure_copy(device: torch.device) -> float:
    """Bytes per second of a copy, read and written."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES // 64
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device) * 1e3


def median_ms(work: Callable[[], object], device: torch.device, *, warmup: int = 2, repeats: int = 5) -> float:
    """Median milliseconds of `work` on the device; short work runs many times between two marks."""
    for _ in range(warmup):
        work()
    count = max(1, min(100, int(ENOUGH_MS / max(run_ms(work, device), 1e-3))))
    times = sorted(run_ms(work, device, count) for _ in range(repeats))
    return times[repeats // 2]


def run_ms(work: Callable[[], object], device: torch.device, count: int = 1) -> float:
    """Milliseconds of one of `count` runs, device time on a GPU."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - began) * 1e3 / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count
