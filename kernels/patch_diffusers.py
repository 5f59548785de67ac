"""Puts the fused operators into a transformer of diffusers, in place.

Parameters, their names and all interfaces stay as they are, so checkpoints, LoRA, FSDP, offloading and gradient
checkpointing work as before. Norms, modulation and gates compute in float32 with one rounding per stored tensor.

Legend: `B` samples, `S` tokens of one sample, `D` hidden size, `H` heads, `hd` head dim, `G` segments (tokens that
share a modulation row).
"""

import logging
from types import MethodType

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_qwenimage as qwen
from diffusers.models.transformers import transformer_wan as wan
from torch import nn

from adaptiveload.kernels.adaln import adaln, layer_norm_modulate
from adaptiveload.kernels.qk_norm_rope import qk_norm_rope

logger = logging.getLogger(__name__)


def patch_diffusers(model: nn.Module) -> None:
    """Make `model` compute its norms, modulation, gates, QK norm and rotary embedding by the fused operators.

    What it has and the operators do not cover, or somebody else has replaced, is left as it is and named in the log.
    Patching twice does nothing more.

    Args:
        model: A `WanTransformer3DModel` or a `QwenImageTransformer2DModel`.

    Raises:
        ValueError: If it is another model.
    """
    if isinstance(model, wan.WanTransformer3DModel):
        leftovers = _patch_wan(model)
    elif isinstance(model, qwen.QwenImageTransformer2DModel):
        leftovers = _patch_qwen(model)
    else:
        supported = "WanTransformer3DModel and QwenImageTransformer2DModel"
        raise ValueError(f"cannot patch a {type(model).__name__}; supported are {supported} of diffusers")
    logger.warning("patched %s; left as in diffusers: %s", type(model).__name__, ", ".join(leftovers) or "nothing")


def _patch_wan(model: wan.WanTransformer3DModel) -> list[str]:
    leftovers = ["norm_out"]  # its modulation is written out in the forward of the model
    for index, block in enumerate(model.blocks):
        block.forward = MethodType(_wan_block, block)
        for name in ("attn1", "attn2"):
            leftovers += _swap_processor(
                getattr(block, name), f"blocks.{index}.{name}", wan.WanAttnProcessor, FusedWanProcessor
            )
        leftovers += [f"blocks.{index}.attn2.norm_added_k"] if block.attn2.add_k_proj is not None else []
    return leftovers


def _patch_qwen(model: qwen.QwenImageTransformer2DModel) -> list[str]:
    leftovers = ["txt_norm"]
    for index, block in enumerate(model.transformer_blocks):
        if block.zero_cond_t:  # the row of each token is known to the GPU only
            leftovers.append(f"transformer_blocks.{index}.img_norm1, .img_norm2 and the text's")
        else:
            block.forward = MethodType(_qwen_block, block)
        leftovers += _swap_processor(
            block.attn,
            f"transformer_blocks.{index}.attn",
            qwen.QwenDoubleStreamAttnProcessor2_0,
            FusedQwenProcessor,
        )
    model.norm_out.forward = MethodType(_continuous_norm, model.norm_out)
    return leftovers


def _swap_processor(attention: nn.Module, name: str, known: type, fused: type) -> list[str]:
    """Put in a `fused` processor for a `known` one; the name of what was left, if any."""
    old = attention.processor
    if type(old) is fused:
        return []
    if type(old) is not known:
        return [f"{name} ({type(old).__name__})"]
    new = fused()
    new._attention_backend, new._parallel_config = old._attention_backend, old._parallel_config
    attention.set_processor(new)
    return []


class _Stream:
    """Tokens [B, S, D] on their way through a block, packed; every residual add joins the norm behind it."""

    def __init__(self, tokens: torch.Tensor, rows_per_sample: int = 1):
        batch_size, seq_len, _ = tokens.shape
        self._sizes = (batch_size, seq_len)
        self._x = tokens.flatten(0, 1)
        num_rows = batch_size * rows_per_sample
        # Made anew each time, on the CPU: a few numbers, unless every token has its own row.
        self._offsets = torch.arange(num_rows + 1, dtype=torch.int32, device="cpu") * (seq_len // rows_per_sample)

    def norm(self, eps: float, y: torch.Tensor | None = None, **parts: torch.Tensor | None) -> torch.Tensor:
        """Add `gate * y` to the stream; its norm, modulated [B, S, D]."""
        y = None if y is None else y.flatten(0, 1)
        h, self._x = adaln(self._x, y=y, segment_offsets=self._offsets, eps=eps, **parts)
        return h.unflatten(0, self._sizes)

    def add(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Add `gate * y`; the stream [B, S, D].

        The norm that comes with it is dropped: still a quarter of the memory traffic of separate operations.
        """
        self.norm(1e-6, y, gate=gate)
        return self.tokens()

    def tokens(self) -> torch.Tensor:
        """[B, S, D]."""
        return self._x.unflatten(0, self._sizes)


def _wan_block(block, hidden_states, encoder_hidden_states, temb, rotary_emb) -> torch.Tensor:
    """`WanTransformerBlock.forward`."""
    per_token = temb.ndim == 4  # [B, S, 6, D] in Wan 2.2 TI2V, else [B, 6, D]
    table = block.scale_shift_table.float()
    rows = ((table.unsqueeze(0) if per_token else table) + temb.float()).flatten(0, -3)  # [G, 6, D]
    shift1, scale1, gate1, shift2, scale2, gate2 = rows.unbind(1)
    stream = _Stream(hidden_states, hidden_states.shape[1] if per_token else 1)

    y = block.attn1(stream.norm(block.norm1.eps, scale=scale1, shift=shift1), None, None, rotary_emb)
    if isinstance(block.norm2, nn.Identity):  # cross_attn_norm=False
        h = stream.add(y, gate1)
    else:
        h = stream.norm(block.norm2.eps, y, gate=gate1, weight=block.norm2.weight, bias=block.norm2.bias)
    y = block.attn2(h, encoder_hidden_states, None, None)
    y = block.ffn(stream.norm(block.norm3.eps, y, scale=scale2, shift=shift2))
    return stream.add(y, gate2)


def _qwen_block(
    block,
    hidden_states,
    encoder_hidden_states,
    encoder_hidden_states_mask,
    temb,
    image_rotary_emb=None,
    joint_attention_kwargs=None,
    modulate_index=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`QwenImageTransformerBlock.forward` without `zero_cond_t`."""
    streams = {"img": _Stream(hidden_states), "txt": _Stream(encoder_hidden_states)}
    parts = {
        "img": block.img_mod(temb).chunk(6, dim=-1),  # shift, scale, gate of the attention, and of the MLP; [B, D]
        "txt": block.txt_mod(temb).chunk(6, dim=-1),
    }
    eps = block.img_norm1.eps
    image, text = (streams[name].norm(eps, scale=parts[name][1], shift=parts[name][0]) for name in ("img", "txt"))
    outputs = block.attn(
        hidden_states=image,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=encoder_hidden_states_mask,
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    results = {}
    for name, y, mlp in zip(("img", "txt"), outputs, (block.img_mlp, block.txt_mlp), strict=True):
        _, _, gate1, shift2, scale2, gate2 = parts[name]
        y = mlp(streams[name].norm(eps, y, gate=gate1, scale=scale2, shift=shift2))
        result = streams[name].add(y, gate2)
        results[name] = result.clip(-65504, 65504) if result.dtype == torch.float16 else result
    return results["txt"], results["img"]


def _continuous_norm(norm, x: torch.Tensor, conditioning_embedding: torch.Tensor) -> torch.Tensor:
    """`AdaLayerNormContinuous.forward`, of a layer norm without affine part."""
    scale, shift = norm.linear(norm.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
    return layer_norm_modulate(x, scale, shift, norm.norm.eps)


def _qk(q: torch.Tensor, k: torch.Tensor, q_norm: nn.Module, k_norm: nn.Module, rotary: torch.Tensor | None):
    """Queries and keys [B, S, H, hd], normed and turned."""
    sizes = [tensor.shape[:2] for tensor in (q, k)]
    turned = qk_norm_rope(q.flatten(0, 1), k.flatten(0, 1), q_norm.weight, k_norm.weight, rotary, q_norm.eps)
    return [tensor.unflatten(0, size) for tensor, size in zip(turned, sizes, strict=True)]


class _Processor:
    """What diffusers sets on a processor."""

    _attention_backend = None
    _parallel_config = None

    def _attend(self, query, key, value, attention_mask, parallel_config) -> torch.Tensor:
        """[B, S, H, hd] to [B, S, D], in the dtype of the query."""
        output = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=parallel_config,
        )
        return output.flatten(2, 3).type_as(query)


class FusedWanProcessor(_Processor):
    """`WanAttnProcessor` with the norm and rotation of queries and keys in one operator."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """[B, S, D] to [B, S, D]."""
        # Self attention alone is split over ranks: https://github.com/huggingface/diffusers/pull/12909
        parallel_config = self._parallel_config if encoder_hidden_states is None else None
        image_context = None
        if attn.add_k_proj is not None:  # image tokens come before 512 of text
            num_images = encoder_hidden_states.shape[1] - 512
            image_context, encoder_hidden_states = encoder_hidden_states.split([num_images, 512], dim=1)
        projections = wan._get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        query, key, value = (tensor.unflatten(2, (attn.heads, -1)) for tensor in projections)
        rotary = None
        if rotary_emb is not None:
            cosine, sine = rotary_emb  # [1, S, 1, hd], every number twice
            rotary = torch.complex(cosine[0, :, 0, 0::2].float(), sine[0, :, 0, 1::2].float())
        query, key = _qk(query, key, attn.norm_q, attn.norm_k, rotary)
        output = self._attend(query, key, value, attention_mask, parallel_config)
        if image_context is not None:
            key, value = wan._get_added_kv_projections(attn, image_context)
            key, value = (tensor.unflatten(2, (attn.heads, -1)) for tensor in (attn.norm_added_k(key), value))
            output = output + self._attend(query, key, value, None, None)
        return attn.to_out[1](attn.to_out[0](output))


class FusedQwenProcessor(_Processor):
    """`QwenDoubleStreamAttnProcessor2_0` with the norm and rotation of queries and keys in one operator a stream."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image and text [B, S, D] to the same."""
        if attention_mask is not None:
            raise ValueError("attention_mask is not taken; give encoder_hidden_states_mask")
        head_dim = attn.inner_dim // attn.heads
        image_rotary, text_rotary = (None, None) if image_rotary_emb is None else image_rotary_emb  # [S, hd / 2]
        streams = []
        for tokens, projections, norms, rotary in (
            (
                encoder_hidden_states,
                (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
                (attn.norm_added_q, attn.norm_added_k),
                text_rotary,
            ),
            (hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k), image_rotary),
        ):
            query, key, value = (projection(tokens).unflatten(-1, (-1, head_dim)) for projection in projections)
            streams.append([*_qk(query, key, *norms, rotary), value])
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(*streams, strict=True))  # text, then image
        mask = None
        if encoder_hidden_states_mask is not None:
            image_mask = encoder_hidden_states_mask.new_ones(hidden_states.shape[:2])
            mask = torch.cat([encoder_hidden_states_mask, image_mask], dim=1)[:, None, None]
        output = self._attend(query, key, value, mask, self._parallel_config)
        text, image = output.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        image = attn.to_out[0](image.contiguous())
        image = attn.to_out[1](image) if len(attn.to_out) > 1 else image
        return image, attn.to_add_out(text.contiguous())
