"""The one entry to the fused RMSNorm and rotary embedding of queries and keys, and its two operators.

Both are read where the projections left them, also as views of one qkv tensor. One node a call in the autograd graph.
Kept for backward: queries and keys as given, and one number for each norm; no normalised copy. There is no second
derivative.

Legend: `N` query tokens, `M` key tokens, `H` heads, `hd` head dim, `W` dims of one norm: H * hd or hd.
"""

import torch

from adaptiveload.kernels.backends import backend_for
from adaptiveload.kernels.library import DTYPES
from adaptiveload.kernels.qk_reference import QkInputs

FORWARD, BACKWARD = "adaptiveload::qk_norm_rope", "adaptiveload::qk_norm_rope_backward"
_GIVEN = "Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor? rotary"


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope(rms_norm(q) * q_weight)`, and the same of the keys.

    The length of the weights says what is normalised together: H * hd is all heads of a token (Wan), hd is each head
    by itself (MMDiT). Arithmetic is float32 with one rounding, at the end; diffusers rounds after the norm too.

    Args:
        q: Queries [N, H, hd]. Any strides; last stride 1 is read without a copy.
        k: Keys [M, H, hd], in the dtype of `q`.
        q_weight: Of the norm [W].
        k_weight: Of the norm [W].
        rotary: Unit complex numbers [R, hd / 2]: token n turns its pairs of neighbouring dims by row n % R. One row
            a token of a packed batch, or the rows of one sample where all have the same shape. A row of ones leaves a
            token as it is. None turns nothing: cross attention.
        eps: Added to the mean square.

    Returns:
        [N, H, hd] and [M, H, hd], contiguous, in the dtype of `q`.

    Raises:
        ValueError: If a shape, a dtype or a device does not fit.
    """
    _check(q, k, q_weight, k_weight, rotary)
    turns = None if rotary is None else torch.view_as_real(rotary)
    q_out, k_out, _, _ = torch.ops.adaptiveload.qk_norm_rope(q, k, q_weight, k_weight, turns, eps)
    return q_out, k_out


def _check(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, rotary: torch.Tensor | None
) -> None:
    if q.ndim != 3 or k.ndim != 3 or q.shape[1:] != k.shape[1:]:
        raise ValueError(f"q and k must be [N, H, hd] and [M, H, hd], got {list(q.shape)} and {list(k.shape)}")
    _, num_heads, head_dim = q.shape
    dims = (head_dim, num_heads * head_dim)
    for name, tensor in {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "rotary": rotary}.items():
        if tensor is None:
            continue
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
        is_wide = tensor.dtype in (torch.float64, torch.complex128) and q.device.type == "cpu"
        if name == "rotary":
            if tensor.dtype != torch.complex64 and not is_wide:
                raise ValueError(f"rotary is {tensor.dtype}; it must be complex64, or complex128 on the CPU")
        elif tensor.dtype not in DTYPES and not is_wide:
            raise ValueError(f"{name} is {tensor.dtype}; it must be float32, bfloat16 or float16 (float64 on the CPU)")
    if k.dtype != q.dtype:
        raise ValueError(f"k is {k.dtype}, q {q.dtype}")
    if q_weight.shape != k_weight.shape or q_weight.ndim != 1 or len(q_weight) not in dims:
        got = f"{list(q_weight.shape)} and {list(k_weight.shape)}"
        raise ValueError(f"weights must both be [{dims[0]}] (each head) or [{dims[1]}] (all heads), got {got}")
    if rotary is None:
        return
    if head_dim % 2 or rotary.ndim != 2 or rotary.shape[1] != head_dim // 2:
        raise ValueError(f"rotary must be [R, hd / 2] for an even hd, got {list(rotary.shape)} and hd {head_dim}")
    for name, tensor in (("q", q), ("k", k)):
        if len(tensor) % max(len(rotary), 1) or (len(tensor) and not len(rotary)):
            raise ValueError(f"{name} has {len(tensor)} tokens, not a multiple of the {len(rotary)} rows of rotary")


torch.library.define(
    FORWARD,
    f"({_GIVEN}, float eps) -> (Tensor q_out, Tensor k_out, Tensor q_rstd, Tensor k_rstd)",
    tags=torch.Tag.pt2_compliant_tag,
)
# Weight gradients that are not wanted are empty tensors: an operator cannot return None.
torch.library.define(
    BACKWARD,
    f"(Tensor dq_out, Tensor dk_out, {_GIVEN}, Tensor q_rstd, Tensor k_rstd, bool are_weights_wanted)"
    " -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl(FORWARD, ("cpu", "cuda"))
def _forward(q, k, q_weight, k_weight, rotary, eps):
    return backend_for(q.device).qk.forward(QkInputs(q, k, q_weight, k_weight, rotary), eps)


@torch.library.impl(BACKWARD, ("cpu", "cuda"))
def _backward(dq_out, dk_out, q, k, q_weight, k_weight, rotary, q_rstd, k_rstd, are_weights_wanted):
    dq, dk, *dweights = backend_for(q.device).qk.backward(
        dq_out, dk_out, QkInputs(q, k, q_weight, k_weight, rotary), q_rstd, k_rstd, are_weights_wanted
    )
    return dq, dk, *(q.new_empty(0) if dweight is None else dweight for dweight in dweights)


@torch.library.register_fake(FORWARD)
def _fake_forward(q, k, q_weight, k_weight, rotary, eps):
    wide = torch.promote_types(q.dtype, torch.float32)
    num_groups = q.shape[1] * q.shape[2] // q_weight.shape[0]
    results = (tensor.new_empty(tensor.shape) for tensor in (q, k))
    return *results, *(tensor.new_empty((tensor.shape[0], num_groups), dtype=wide) for tensor in (q, k))


@torch.library.register_fake(BACKWARD)
def _fake_backward(dq_out, dk_out, q, k, q_weight, k_weight, rotary, q_rstd, k_rstd, are_weights_wanted):
    dweights = (w.new_empty(w.shape) if are_weights_wanted else q.new_empty(0) for w in (q_weight, k_weight))
    return q.new_empty(q.shape), k.new_empty(k.shape), *dweights


def _setup_context(ctx, inputs, output) -> None:
    *given, _ = inputs
    _, _, q_rstd, k_rstd = output
    ctx.save_for_backward(*given, q_rstd, k_rstd)
    ctx.mark_non_differentiable(q_rstd, k_rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dq_out, dk_out, *_):
    saved = ctx.saved_tensors  # once: checkpointing recomputes at each access
    dq_out, dk_out = (
        torch.zeros_like(tensor) if grad is None else grad for tensor, grad in ((saved[0], dq_out), (saved[1], dk_out))
    )
    are_weights_wanted = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
    dq, dk, *dweights = torch.ops.adaptiveload.qk_norm_rope_backward(dq_out, dk_out, *saved, are_weights_wanted)
    return dq, dk, *(dweights if are_weights_wanted else (None, None)), None, None


def _refuse(ctx, *_):
    raise RuntimeError("qk_norm_rope has no second derivative: call backward without create_graph")


torch.library.register_autograd(FORWARD, _differentiate, setup_context=_setup_context)
torch.library.register_autograd(BACKWARD, _refuse)
