"""The one entry to the fused adaptive LayerNorm: gated residual add, LayerNorm, modulation.

Every norm of a diffusion transformer block is one call. The residual add that precedes a norm belongs to it, because
both read and write the same [N, D] tensor.

Legend: `N` tokens of all samples side by side, `D` hidden size, `G` segments (tokens that share a modulation row).
"""

import functools
import logging
import os

import torch

from adaptiveload.kernels import reference

logger = logging.getLogger(__name__)


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
        ValueError: If a shape does not fit, or `gate` comes without `y`.
    """
    _check(x, y, gate, scale, shift, weight, bias, segment_offsets)
    if x.is_cuda:
        _log_fallback_once()
    return reference.adaln(
        x,
        y=y,
        gate=gate,
        scale=scale,
        shift=shift,
        weight=weight,
        bias=bias,
        segment_offsets=segment_offsets,
        eps=eps,
        out_dtype=out_dtype or x.dtype,
    )


def layer_norm_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`LN(x) * (1 + scale) + shift` for samples of one length: x and result [B, S, D], scale and shift [B, D]."""
    batch_size, seq_len, _ = x.shape
    offsets = torch.arange(batch_size + 1, dtype=torch.int32, device="cpu") * seq_len
    h, _ = adaln(x.flatten(0, 1), scale=scale, shift=shift, segment_offsets=offsets, eps=eps)
    return h.unflatten(0, (batch_size, seq_len))


def _check(x, y, gate, scale, shift, weight, bias, segment_offsets) -> None:
    if x.ndim != 2:
        raise ValueError(f"x must be [N, D], got {list(x.shape)}")
    if gate is not None and y is None:
        raise ValueError("gate multiplies y: give y too")
    num_tokens, hidden_size = x.shape
    num_segments = segment_offsets.numel() - 1
    if num_segments < 1 or int(segment_offsets[-1]) != num_tokens:
        raise ValueError(f"segment_offsets {segment_offsets.tolist()} must end at {num_tokens}, the tokens of x")
    rows = (num_segments, hidden_size)
    expected = {"y": tuple(x.shape), "gate": rows, "scale": rows, "shift": rows}
    expected |= {"weight": (hidden_size,), "bias": (hidden_size,)}
    given = {"y": y, "gate": gate, "scale": scale, "shift": shift, "weight": weight, "bias": bias}
    for name, tensor in given.items():
        if tensor is not None and tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{name} must be {list(expected[name])}, got {list(tensor.shape)}")


@functools.cache
def _log_fallback_once() -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning("AdaLN runs as plain PyTorch on CUDA: this build has no fused kernel")
