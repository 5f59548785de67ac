"""The fused AdaLN operation in plain PyTorch: what every kernel is tested against, and what the CPU runs.

All arithmetic is float32 (float64 for float64 input), with one rounding per result.

Legend: `N` tokens of all samples side by side, `D` hidden size, `G` segments (tokens that share a modulation row).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from adaptiveload.kernels import qk_reference as qk  # noqa: F401 (the other operation of this backend)
from adaptiveload.kernels.segments import equal_runs

name = "reference"  # among the backends


class Inputs(NamedTuple):
    """Of one AdaLN call, as `adaptiveload.kernels.adaln.adaln` describes them."""

    x: torch.Tensor
    y: torch.Tensor | None
    gate: torch.Tensor | None
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    segment_offsets: torch.Tensor


class Gradients(NamedTuple):
    """Of one AdaLN call; None where none was wanted, or there is no such input."""

    x: torch.Tensor
    y: torch.Tensor | None
    gate: torch.Tensor | None
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class Wanted(NamedTuple):
    """Which gradients to compute."""

    y: bool
    gate: bool
    scale: bool
    shift: bool
    weight: bool
    bias: bool


def forward(
    inputs: Inputs, eps: float, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """`h`, `x_out` (None without `y`), and the mean and reciprocal deviation of every token [N]."""
    x, y, gate, scale, shift, weight, bias, segment_offsets = inputs
    wide = _wide(x)
    h = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    x_out = None if y is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(len(x), dtype=wide, device=x.device) for _ in range(2))
    for tokens, rows, shape in _runs(segment_offsets):
        stream = x[tokens]
        if x_out is not None:
            update = y[tokens].to(wide)
            if gate is not None:
                update = (update.view(shape) * gate[rows].to(wide).unsqueeze(1)).flatten(0, 1)
            # Rounded to the stored dtype before the statistics: a backward that reads the stored residual would
            # otherwise be off by 1e-3 in the gradient of `scale`.
            stream = x_out[tokens] = (stream.to(wide) + update).to(x.dtype)
        normalised, run_mean, run_rstd = torch.native_layer_norm(
            stream.to(wide), x.shape[1:], _to(weight, wide), _to(bias, wide), eps
        )
        normalised = normalised.view(shape)
        if scale is not None:
            normalised = normalised * (1 + scale[rows].to(wide).unsqueeze(1))
        if shift is not None:
            normalised = normalised + shift[rows].to(wide).unsqueeze(1)
        h[tokens] = normalised.flatten(0, 1).to(out_dtype)
        mean[tokens], rstd[tokens] = run_mean.squeeze(1), run_rstd.squeeze(1)
    return h, x_out, mean, rstd


def backward(
    dh: torch.Tensor,
    dx_out: torch.Tensor | None,
    inputs: Inputs,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    wanted: Wanted,
    y_dtype: torch.dtype,
) -> Gradients:
    """Gradients of `forward`.

    Args:
        dh: Gradient of `h` [N, D].
        dx_out: Gradient of `x_out` [N, D], or None if it has none.
        inputs: As given to `forward`, but `x` is what was normalised, `x_out` where there was a `y`; `y` itself is
            only read for the gradient of `gate`.
        mean: As returned.
        rstd: As returned.
        wanted: Gradients to compute.
        y_dtype: Of the gradient of `y`.
    """
    x, y, gate, scale, shift, weight, bias, segment_offsets = inputs
    wide = _wide(x)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dy = torch.empty(x.shape, dtype=y_dtype, device=x.device) if wanted.y else None
    num_segments = segment_offsets.numel() - 1
    by_segment = {
        name: torch.zeros(num_segments, x.shape[1], dtype=wide, device=x.device)
        for name in ("gate", "scale", "shift", "weight", "bias")
        if getattr(wanted, name)
    }
    weight_wide = 1.0 if weight is None else weight.to(wide)
    bias_wide = 0.0 if bias is None else bias.to(wide)
    for tokens, rows, shape in _runs(segment_offsets):
        normalised = ((x[tokens].to(wide) - mean[tokens, None]) * rstd[tokens, None]).view(shape)
        grad = dh[tokens].to(wide).view(shape)
        factor = 1 if scale is None else 1 + scale[rows].to(wide).unsqueeze(1)
        weighted = grad * (factor * weight_wide)
        along = (weighted * normalised).mean(-1, keepdim=True)
        centred = weighted - weighted.mean(-1, keepdim=True) - normalised * along
        total = rstd[tokens].view(*shape[:2], 1) * centred  # gradient of the residual stream
        if dx_out is not None:
            total = total + dx_out[tokens].to(wide).view(shape)
        dx[tokens] = total.flatten(0, 1).to(x.dtype)
        if dy is not None:
            update = total if gate is None else total * gate[rows].to(wide).unsqueeze(1)
            dy[tokens] = update.flatten(0, 1).to(y_dtype)
        for name, gradient in by_segment.items():
            if name == "gate":
                summand = y[tokens].to(wide).view(shape) * total
            elif name == "scale":
                summand = grad * (normalised * weight_wide + bias_wide)
            elif name == "shift":
                summand = grad
            elif name == "weight":
                summand = grad * factor * normalised
            else:
                summand = grad * factor
            gradient[rows] = summand.sum(1)

    def finished(name: str, like: torch.Tensor | None) -> torch.Tensor | None:
        if name not in by_segment:
            return None
        gradient = by_segment[name]
        return (gradient.sum(0) if name in ("weight", "bias") else gradient).to(like.dtype)

    return Gradients(
        x=dx,
        y=dy,
        gate=finished("gate", gate),
        scale=finished("scale", scale),
        shift=finished("shift", shift),
        weight=finished("weight", weight),
        bias=finished("bias", bias),
    )


def _runs(segment_offsets: torch.Tensor) -> Iterator[tuple[slice, slice, tuple[int, int, int]]]:
    """Tokens, modulation rows and shape [segments, length, D] of neighbouring segments of equal length.

    They share one broadcast. Expanding the modulation to one row per token instead would store three float32 [N, D]
    tensors per call.
    """
    row = token = 0
    for count, length in equal_runs(segment_offsets):
        if length:
            yield slice(token, token + count * length), slice(row, row + count), (count, length, -1)
        row, token = row + count, token + count * length


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _to(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)
