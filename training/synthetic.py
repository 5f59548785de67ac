"""Micro-batches of random latents and texts, so that a benchmark needs no dataset; they cost what real ones cost."""

from collections.abc import Iterable, Sequence

import torch

from adaptiveload.models.attention import JOINT_PLANS, AttentionBatch, attention_batches, packed_attention
from adaptiveload.models.config import ModelConfig
from adaptiveload.models.mmdit import MMDiTConfig
from adaptiveload.models.packing import PackedBatch, PackedSample, filler_sample, pack
from adaptiveload.scheduling.shapes import LatentGeometry, Shape


def synthetic_batch(
    shapes: Sequence[Shape], geometry: LatentGeometry, model: ModelConfig, device: torch.device
) -> PackedBatch:
    """A micro-batch of one sample of each of `shapes`, on `device`; of one filler of the smallest shape if empty."""
    if not shapes:
        grid = geometry.token_grid(Shape(1, *geometry.pixel_multiple))
        return pack([filler_sample(tuple(grid), geometry.token_size, model.text_dim)]).to(device)
    samples = []
    for number, shape in enumerate(shapes):
        grid = geometry.token_grid(shape)
        latents, noise = torch.randn(2, grid.frames * grid.rows * grid.columns, geometry.token_size, device=device)
        text = torch.randn(model.text_len, model.text_dim, device=device)
        samples.append(PackedSample(f"{shape}-{number}", tuple(grid), latents, noise, 0.5, text))
    return pack(samples).to(device)


def warm_up_attention(
    micro_batches: Iterable[Sequence[int]],
    model: ModelConfig,
    device: torch.device,
    precision: str,
    planned: set[AttentionBatch] | None = None,
) -> int:
    """Run each dense attention call that these micro-batches (lengths of their samples) will make, once.

    cuDNN plans every new batch size and length for 0.1 to 0.2 s, which is no part of what a schedule costs.

    Args:
        micro_batches: Lengths of the samples of each.
        model: Sizes of the model.
        device: Where it computes.
        precision: "bf16" or "fp32".
        planned: Calls that need no more, from earlier; what is run here is added.

    Returns:
        Calls that were run; 0 on CPU, where nothing is planned.
    """
    if device.type != "cuda":
        return 0
    # Text joins the sequence, or has an attention of its own; `synthetic_batch` gives every sample all rows.
    joined = model.text_len if isinstance(model, MMDiTConfig) else 0
    calls: set[AttentionBatch] = set()
    for lengths in micro_batches:
        offsets = torch.tensor([0, *(length + joined for length in sorted(lengths))], dtype=torch.int32).cumsum(0)
        for key_len in (None,) if joined else (None, model.text_len):
            calls |= set(attention_batches(offsets, key_len))
    calls -= planned or set()
    heads = (model.num_attention_heads, model.attention_head_dim)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for call in sorted(calls):
        rows = (call.batch_size * call.query_len, call.batch_size * call.key_len, call.batch_size * call.key_len)
        tensors = [torch.randn(n, *heads, device=device, dtype=dtype, requires_grad=True) for n in rows]
        packed_attention(*tensors, [call]).sum().backward()
        if joined:
            JOINT_PLANS.add(call)
    if planned is not None:
        planned |= calls
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return len(calls)
