"""The one entry to the fused adaptive LayerNorm: gated residual add, LayerNorm, modulation.

Every norm of a diffusion transformer block is one call. The residual add that precedes a norm belongs to it, because
both read and write the same [N, D] tensor.

Legend: `N` tokens of all samples side by side, `D` hidden size, `G` segments (tokens that share a modulation row).
"""

import torch

from adaptiveload.kernels import ops  # noqa: F401 (defines torch.ops.adaptiveload)
from adaptiveload.kernels.library import DTYPES


def adaln(
    x: torch.Tensor,
    *,
    y: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    segment_offsets: torch.Tensor,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual add and the norm behind it: `x_out = x + gate * y`, `h = LN(x_out) * (1 + scale) + shift`.

    What is left out is skipped: no `y`, no update; no `gate`, a plain one; no `weight`, a norm without affine part.
    Arithmetic is float32 whatever the inputs are, and `x_out` is rounded to its dtype before the statistics are taken.

    Args:
        x: Residual stream [N, D].
        y: Output of the previous sublayer, not yet added [N, D].
        gate: Factor of `y` [G, D].
        scale: Modulation of the norm [G, D].
        shift: Modulation of the norm [G, D].
        weight: Affine part of the norm [D].
        bias: Affine part of the norm [D].
        segment_offsets: First token of each segment, and N: integers [G + 1] on the CPU, whatever the device of `x`,
            so that launches can be laid out without waiting for the device.
        eps: Added to the variance.
        out_dtype: Of `h`; that of `x` by default.

    Returns:
        `h` [N, D] in `out_dtype`, and `x_out` [N, D] in the dtype of `x` (`x` itself when there is no `y`).

    Raises:
        ValueError: If a shape, a dtype or a device does not fit, the offsets do not cover `x`, or `gate` comes
            without `y`.
    """
    _check(x, {"y": y, "gate": gate, "scale": scale, "shift": shift, "weight": weight, "bias": bias}, segment_offsets)
    h, x_out, _, _ = torch.ops.adaptiveload.adaln(
        x, y, gate, scale, shift, weight, bias, segment_offsets, eps, out_dtype or x.dtype
    )
    return h, x if y is None else x_out


def layer_norm_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`LN(x) * (1 + scale) + shift`: x and result [B, S, D]; scale and shift [B, D], [B, 1, D] or [B, S, D].

    Raises:
        ValueError: If a shape is none of these.
    """
    batch_size, seq_len, hidden_size = x.shape
    rows = []
    for name, tensor in (("scale", scale), ("shift", shift)):
        row = tensor.unsqueeze(1) if tensor.ndim == 2 else tensor  # [B, 1 or S, D]
        if row.shape not in ((batch_size, 1, hidden_size), (batch_size, seq_len, hidden_size)):
            forms = "[B, D], [B, 1, D] or [B, S, D]"
            raise ValueError(f"{name} must be {forms} for x {list(x.shape)}, got {list(tensor.shape)}")
        rows.append(row)
    per_sample = max(tensor.shape[1] for tensor in rows)
    scale, shift = (tensor.expand(-1, per_sample, -1).flatten(0, 1) for tensor in rows)
    offsets = torch.arange(batch_size * per_sample + 1, dtype=torch.int32, device="cpu") * (seq_len // per_sample)
    h, _ = adaln(x.flatten(0, 1), scale=scale, shift=shift, segment_offsets=offsets, eps=eps)
    return h.unflatten(0, (batch_size, seq_len))


def _check(x: torch.Tensor, parts: dict[str, torch.Tensor | None], segment_offsets: torch.Tensor) -> None:
    if x.ndim != 2:
        raise ValueError(f"x must be [N, D], got {list(x.shape)}")
    if parts["gate"] is not None and parts["y"] is None:
        raise ValueError("gate multiplies y: give y too")
    if segment_offsets.device.type != "cpu" or segment_offsets.ndim != 1 or segment_offsets.numel() < 1:
        where = f"{list(segment_offsets.shape)} on {segment_offsets.device}"
        raise ValueError(f"segment_offsets must be a CPU tensor [G + 1], got {where}")
    num_tokens, hidden_size = x.shape
    rows = (segment_offsets.numel() - 1, hidden_size)
    expected = {"y": (num_tokens, hidden_size), "weight": (hidden_size,), "bias": (hidden_size,)}
    for name, tensor in {"x": x, **parts}.items():
        if tensor is None:
            continue
        shape = x.shape if name == "x" else expected.get(name, rows)
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")
        if tensor.dtype not in DTYPES and not (tensor.dtype == torch.float64 and x.device.type == "cpu"):
            raise ValueError(f"{name} is {tensor.dtype}; it must be float32, bfloat16 or float16 (float64 on the CPU)")
