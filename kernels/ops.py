"""AdaLN as two operators that autograd, `torch.compile` and checkpointing know as opaque.

One node a call in the autograd graph. Kept for backward: the residual stream as stored, two numbers per token, and `y`
where there is a gate. There is no second derivative.

Legend: `N` tokens of all samples side by side, `D` hidden size, `G` segments (tokens that share a modulation row).
"""

import torch

from adaptiveload.kernels.backends import backend_for
from adaptiveload.kernels.reference import Inputs, Wanted

FORWARD, BACKWARD = "adaptiveload::adaln", "adaptiveload::adaln_backward"
_PARTS = "Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias"

# What a call has not is an empty tensor: an operator cannot return None.
torch.library.define(
    FORWARD,
    f"(Tensor x, Tensor? y, {_PARTS}, Tensor segment_offsets, float eps, ScalarType out_dtype)"
    " -> (Tensor h, Tensor x_out, Tensor mean, Tensor rstd)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    BACKWARD,
    f"(Tensor dh, Tensor? dx_out, Tensor x, Tensor? y, {_PARTS}, Tensor mean, Tensor rstd, Tensor segment_offsets,"
    " bool[] wanted, ScalarType y_dtype)"
    " -> (Tensor dx, Tensor dy, Tensor dgate, Tensor dscale, Tensor dshift, Tensor dweight, Tensor dbias)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl(FORWARD, ("cpu", "cuda"))
def _forward(x, y, gate, scale, shift, weight, bias, segment_offsets, eps, out_dtype):
    _check_offsets(segment_offsets, len(x))
    inputs = Inputs(x, y, gate, scale, shift, weight, bias, segment_offsets)
    h, x_out, mean, rstd = backend_for(x.device).forward(inputs, eps, out_dtype)
    return h, _or_empty(x_out, x), mean, rstd


@torch.library.impl(BACKWARD, ("cpu", "cuda"))
def _backward(
    dh, dx_out, x, y, gate, scale, shift, weight, bias, mean, rstd, segment_offsets, wanted, y_dtype
):  # fmt: skip
    inputs = Inputs(x, y, gate, scale, shift, weight, bias, segment_offsets)
    gradients = backend_for(x.device).backward(dh, dx_out, inputs, mean, rstd, Wanted(*wanted), y_dtype)
    return tuple(_or_empty(gradient, x) for gradient in gradients)


@torch.library.register_fake(FORWARD)
def _fake_forward(x, y, gate, scale, shift, weight, bias, segment_offsets, eps, out_dtype):
    wide = torch.promote_types(x.dtype, torch.float32)
    x_out = x.new_empty(0 if y is None else x.shape)
    return x.new_empty(x.shape, dtype=out_dtype), x_out, *(x.new_empty(x.shape[:1], dtype=wide) for _ in range(2))


@torch.library.register_fake(BACKWARD)
def _fake_backward(
    dh, dx_out, x, y, gate, scale, shift, weight, bias, mean, rstd, segment_offsets, wanted, y_dtype
):  # fmt: skip
    wanted = Wanted(*wanted)
    inputs = {"gate": gate, "scale": scale, "shift": shift, "weight": weight, "bias": bias}
    parts = (
        tensor.new_empty(tensor.shape) if getattr(wanted, name) else x.new_empty(0) for name, tensor in inputs.items()
    )
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=y_dtype) if wanted.y else x.new_empty(0), *parts


def _setup_context(ctx, inputs, output) -> None:
    x, y, gate, scale, shift, weight, bias, segment_offsets, _, ctx.out_dtype = inputs
    _, x_out, mean, rstd = output
    ctx.y_dtype = x.dtype if y is None else y.dtype
    ctx.has_y = y is not None
    stream = x if y is None else x_out
    kept_y = None if gate is None else y  # only the gradient of the gate needs it
    ctx.save_for_backward(stream, kept_y, gate, scale, shift, weight, bias, mean, rstd, segment_offsets)
    ctx.mark_non_differentiable(mean, rstd, *(() if ctx.has_y else (x_out,)))
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dh, dx_out, *_):
    x, y, gate, scale, shift, weight, bias, mean, rstd, segment_offsets = ctx.saved_tensors
    if dh is None:
        dh = torch.zeros(x.shape, dtype=ctx.out_dtype, device=x.device)
    _, y_needed, *parts_needed = ctx.needs_input_grad[:7]
    # x + y gives both the same gradient.
    is_shared = y_needed and gate is None and ctx.y_dtype == x.dtype
    wanted = [y_needed and not is_shared, *parts_needed]
    dx, dy, *parts = torch.ops.adaptiveload.adaln_backward(
        dh, dx_out, x, y, gate, scale, shift, weight, bias, mean, rstd, segment_offsets, wanted, ctx.y_dtype
    )
    dy = dx if is_shared else dy if y_needed else None
    parts = (part if is_needed else None for part, is_needed in zip(parts, parts_needed, strict=True))
    return dx, dy, *parts, None, None, None


def _refuse(ctx, *_):
    raise RuntimeError("adaln has no second derivative: call backward without create_graph")


torch.library.register_autograd(FORWARD, _differentiate, setup_context=_setup_context)
torch.library.register_autograd(BACKWARD, _refuse)


def _or_empty(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _check_offsets(segment_offsets: torch.Tensor, num_tokens: int) -> None:
    """Here, not in the entry, because `torch.compile` traces that without values."""
    offsets = segment_offsets.tolist()
    if offsets[0] != 0 or offsets[-1] != num_tokens or offsets != sorted(offsets):
        shown = offsets if len(offsets) <= 20 else [*offsets[:10], "...", *offsets[-10:]]
        raise ValueError(f"segment_offsets {shown} must rise from 0 and must end at {num_tokens}, the tokens of x")
