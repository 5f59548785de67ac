"""RMSNorm of queries and keys with rotary embedding, in plain PyTorch: what the kernels are tested against.

All arithmetic is float32 (float64 for float64 input), with one rounding per result.

Legend: `N` query tokens, `M` key tokens, `H` heads, `hd` head dim, `W` dims of one norm: H * hd or hd.
"""

from typing import NamedTuple

import torch


class QkInputs(NamedTuple):
    """As `adaptiveload.kernels.qk_norm_rope.qk_norm_rope` takes, but `rotary` as cosine and sine [R, hd / 2, 2]."""

    q: torch.Tensor
    k: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    rotary: torch.Tensor | None


def forward(inputs: QkInputs, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys, normalised and turned, and the reciprocal root mean squares, [N, H * hd / W] and [M, ...]."""
    q, k, q_weight, k_weight, rotary = inputs
    q_out, q_rstd = _forward(q, q_weight, rotary, eps)
    k_out, k_rstd = _forward(k, k_weight, rotary, eps)
    return q_out, k_out, q_rstd, k_rstd


def backward(
    dq_out: torch.Tensor,
    dk_out: torch.Tensor,
    inputs: QkInputs,
    q_rstd: torch.Tensor,
    k_rstd: torch.Tensor,
    are_weights_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `q`, `k`, and of the two weights (None where not wanted)."""
    q, k, q_weight, k_weight, rotary = inputs
    dq, dq_weight = _backward(dq_out, q, q_weight, rotary, q_rstd, are_weights_wanted)
    dk, dk_weight = _backward(dk_out, k, k_weight, rotary, k_rstd, are_weights_wanted)
    return dq, dk, dq_weight, dk_weight


def rotate(x: torch.Tensor, rotary: torch.Tensor, *, is_inverse: bool = False) -> torch.Tensor:
    """Turn each pair of neighbouring dims of x [N, H, hd] by the angles of row n % R of `rotary` [R, hd / 2, 2]."""
    num_rows = max(len(rotary), 1)
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))  # [N, H, hd / 2]
    turns = torch.view_as_complex(rotary.to(x.dtype)).unsqueeze(1)  # [R, 1, hd / 2]
    turned = pairs.unflatten(0, (len(x) // num_rows, num_rows)) * (turns.conj() if is_inverse else turns)
    return torch.view_as_real(turned).flatten(0, 1).flatten(-2)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, rotary: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = _groups(x, weight)
    rstd = (groups.square().mean(-1) + eps).rsqrt()
    out = (groups * rstd.unsqueeze(-1) * weight.to(groups.dtype)).view(x.shape)
    out = out if rotary is None else rotate(out, rotary)
    return out.to(x.dtype), rstd


def _backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rotary: torch.Tensor | None,
    rstd: torch.Tensor,
    is_weight_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rstd = rstd.unsqueeze(-1)  # [N, D / W, 1]
    normalised = _groups(x, weight) * rstd
    grad = dout.to(normalised.dtype)
    grad = grad.contiguous() if rotary is None else rotate(grad, rotary, is_inverse=True)
    grad = grad.view(normalised.shape)
    weighted = grad * weight.to(grad.dtype)
    dx = rstd * (weighted - normalised * (weighted * normalised).mean(-1, keepdim=True))
    dweight = (grad * normalised).sum((0, 1)).to(weight.dtype) if is_weight_wanted else None
    return dx.view(x.shape).to(x.dtype), dweight


def _groups(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What is normalised together, wide: [N, D / W, W]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    num_groups = x.shape[1] * x.shape[2] // len(weight)
    return x.to(wide).contiguous().view(len(x), num_groups, len(weight))
