"""The fused AdaLN operation in plain PyTorch: what every kernel is tested against, and what the CPU runs.

Legend: `N` tokens of all samples side by side, `D` hidden size, `G` segments (tokens that share a modulation row).
"""

import torch
from torch.nn import functional as F  # noqa: N812 (the name that PyTorch's own documentation uses)

from adaptiveload.kernels.segments import equal_runs


def adaln(
    x: torch.Tensor,
    *,
    y: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    segment_offsets: torch.Tensor,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated residual, LayerNorm and modulation; arguments and result as `adaptiveload.kernels.adaln.adaln`.

    Neighbouring segments of equal length share one broadcast. Expanding the modulation to one row per token instead
    would store three float32 [N, D] tensors per call, and its backward would scatter-add over all of N.
    """
    runs = equal_runs(segment_offsets)
    num_rows = [count for count, _ in runs]
    num_tokens = [count * length for count, length in runs]

    def parts(tensor: torch.Tensor | None, sizes: list[int]) -> tuple[torch.Tensor | None, ...]:
        return (None,) * len(runs) if tensor is None else tensor.split(sizes)

    results = [
        _adaln_run(*part, weight=weight, bias=bias, eps=eps, out_dtype=out_dtype)
        for part in zip(
            parts(x, num_tokens),
            parts(y, num_tokens),
            parts(gate, num_rows),
            parts(scale, num_rows),
            parts(shift, num_rows),
            strict=True,
        )
    ]
    if len(results) == 1:
        return results[0][0], x if y is None else results[0][1]
    h = torch.cat([h for h, _ in results])
    return h, x if y is None else torch.cat([x_out for _, x_out in results])


def _adaln_run(
    x: torch.Tensor,
    y: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    *,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One run of segments of equal length; all arithmetic in float32 (float64 for float64 input)."""
    wide = torch.promote_types(x.dtype, torch.float32)

    def widen(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(wide)

    x_out = x
    if y is not None:
        update = widen(y) if gate is None else _per_segment(torch.mul, widen(y), widen(gate))
        # Rounded to the stored dtype before the statistics: a backward that reads the stored residual would
        # otherwise be off by 1e-3 in the gradient of `scale`.
        x_out = (widen(x) + update).to(x.dtype)
    h = F.layer_norm(widen(x_out), x.shape[-1:], widen(weight), widen(bias), eps)
    if scale is not None:
        h = _per_segment(torch.mul, h, 1 + widen(scale))
    if shift is not None:
        h = _per_segment(torch.add, h, widen(shift))
    return h.to(out_dtype), x_out


def _per_segment(function, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`function(token, its segment's row)` for tokens [G*S, D] and rows [G, D]."""
    return function(tokens.unflatten(0, (len(rows), -1)), rows.unsqueeze(1)).flatten(0, 1)
