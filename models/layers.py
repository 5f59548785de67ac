"""Parts that the transformers share: fp32 time embedding, text projection, attention with RMSNorm over all heads.

Parameter names are those of diffusers. No part relies on autocast or on FSDP casting its inputs: each one computes in
the dtype of its own (gathered) weights, or in float32 where its docstring says so.

Legend: `N` tokens of all samples side by side, `M` keys of all samples, `D` hidden size, `H` heads, `G` segments.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the name that PyTorch's own documentation uses)
from torch.utils.checkpoint import checkpoint

from adaptiveload.kernels.qk_norm_rope import qk_norm_rope
from adaptiveload.models.attention import AttentionCalls, keep_attention
from adaptiveload.models.config import RECOMPUTE_LEVELS
from adaptiveload.models.packing import Grid

# First, last or other block, one segment or more, with and without recomputation: 12, and room for what dtypes add.
_MOST_VARIANTS = 32


class Block(nn.Module):
    """A transformer block whose activations may be computed again in backward instead of being kept.

    Attributes:
        compiled: What training runs in place of `_forward`, see `compile_blocks`.
    """

    compiled: Callable | None = None

    def forward(self, *inputs, recompute: str) -> tuple[torch.Tensor | None, ...]:
        """As `_forward`; `recompute` "full" keeps the inputs for backward, "attention" its attention outputs too.

        Checkpointing happens in here, inside what FSDP shards: a block's weights are gathered once for recomputation
        and backward.
        """
        # Evaluation and sampling would be compiled once more, for little.
        compute = self.compiled if self.compiled is not None and torch.is_grad_enabled() else self._forward
        if recompute == "none" or not torch.is_grad_enabled():
            return compute(*inputs)
        # Nothing here is random.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if recompute == "attention":
            options["context_fn"] = keep_attention
        return checkpoint(compute, *inputs, **options)


def recompute_levels(recompute: str, permille: int, num_layers: int) -> list[str]:
    """`recompute` for the first `permille` thousandths of the blocks, rounded up, and "none" for the others.

    The first, because their backward is the last: by then what the others kept is free.

    Raises:
        ValueError: If `recompute` is none of `RECOMPUTE_LEVELS`.
    """
    if recompute not in RECOMPUTE_LEVELS:
        raise ValueError(f"recompute is {recompute!r}; it is one of {', '.join(RECOMPUTE_LEVELS)}")
    again = -(-num_layers * permille // 1000)
    return [recompute] * again + ["none"] * (num_layers - again)


def compile_blocks(blocks: Iterable[Block], backend: str = "inductor") -> None:
    """Have training run `blocks` through `torch.compile`, attention apart, which stays as it is.

    One compilation serves all blocks and all lengths; further ones are for the first and the last block, a single
    segment, and recomputation. The hooks of FSDP and of the timer lie outside. With
    inductor's fusion of reductions off: on torch 2.10 to 2.14 it gives wrong gradients for chained modulated norms
    (pytorch#193061), and no environment variable can bring it back here.

    Args:
        blocks: Of one model; before or after sharding.
        backend: Of `torch.compile`.
    """
    options = {"triton.mix_order_reduction": False} if backend == "inductor" else None
    # Variants of one block, not shapes; beyond it a block would run uncompiled, and torch would warn.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    for block in blocks:
        block.compiled = torch.compile(block._forward, dynamic=True, backend=backend, options=options)


class LinearFp32(nn.Linear):
    """A linear layer that computes in float32, whatever the dtype of its input and weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to float32 [..., out_features]."""
        return F.linear(x.float(), self.weight.float(), self.bias.float())


def sinusoid(timestep: torch.Tensor, dim: int) -> torch.Tensor:
    """Cosines, then sines, of timestep * 10000 ** (-i / (dim / 2)): float64 inside, float32 [G, dim]."""
    half = dim // 2
    powers = torch.arange(half, dtype=torch.float64, device=timestep.device) / half
    angles = timestep.double().unsqueeze(1) * torch.exp(-math.log(10_000) * powers)  # [G, dim / 2]
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


class PatchEmbedding(nn.Module):
    """Conv3d with stride = kernel, which on tokens is a matrix product; weight and bias are the convolution's."""

    def __init__(self, in_channels: int, hidden_size: int, patch: Grid):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, in_channels, *patch))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [N, C*pf*py*px] in the dtype of the weights, as [N, D]."""
        return F.linear(tokens, self.weight.flatten(1), self.bias)


class TimeEmbedder(nn.Module):
    """Timestep to embedding, in float32."""

    def __init__(self, freq_dim: int, hidden_size: int):
        super().__init__()
        self.freq_dim = freq_dim
        self.linear_1 = LinearFp32(freq_dim, hidden_size)
        self.linear_2 = LinearFp32(hidden_size, hidden_size)

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        """Timesteps [G] in [0, 1000], float32, as embeddings [G, D], float32.

        Raises:
            TypeError: If the timesteps are not float32: bfloat16 rounds 998.4 to 1000.
        """
        if timestep.dtype != torch.float32:
            raise TypeError(f"timesteps must reach the model as float32, got {timestep.dtype}")
        return self.linear_2(F.silu(self.linear_1(sinusoid(timestep, self.freq_dim))))


class TextEmbedder(nn.Module):
    """Text rows to the hidden size."""

    def __init__(self, text_dim: int, hidden_size: int):
        super().__init__()
        self.linear_1 = nn.Linear(text_dim, hidden_size)
        self.linear_2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Text [M, text_dim] as context [M, D]."""
        return self.linear_2(F.gelu(self.linear_1(text), approximate="tanh"))


class Attention(nn.Module):
    """Multi-head attention with biases, and RMSNorm of queries and keys over all heads together, before the split."""

    def __init__(self, hidden_size: int, num_heads: int, eps: float):
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(hidden_size, hidden_size)
        self.to_k = nn.Linear(hidden_size, hidden_size)
        self.to_v = nn.Linear(hidden_size, hidden_size)
        self.to_out = nn.ModuleList([nn.Linear(hidden_size, hidden_size)])
        # Their weights only: `qk_norm_rope` computes.
        self.norm_q = nn.RMSNorm(hidden_size, eps)
        self.norm_k = nn.RMSNorm(hidden_size, eps)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        attention: AttentionCalls,
        rotary: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from x [N, D] to context [M, D], sample by sample; `rotary` [N, hd / 2] turns queries and keys."""
        query, key, value = (
            tensor.unflatten(1, (self.num_heads, -1))  # [N or M, H, hd]
            for tensor in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        query, key = qk_norm_rope(query, key, self.norm_q.weight, self.norm_k.weight, rotary, self.norm_q.eps)
        return self.to_out[0](attention.run(query, key, value))  # [N, D]


class FeedForward(nn.Module):
    """Linear, GELU (tanh), Linear. The list keeps diffusers' parameter names, `net.0.proj` and `net.2`."""

    def __init__(self, hidden_size: int, ffn_dim: int):
        super().__init__()
        up = nn.Module()
        up.proj = nn.Linear(hidden_size, ffn_dim)
        self.net = nn.ModuleList([up, nn.Identity(), nn.Linear(ffn_dim, hidden_size)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, D] to [N, D]."""
        return self.net[2](F.gelu(self.net[0].proj(x), approximate="tanh"))
