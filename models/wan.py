"""Wan's transformer, 2.1 T2V and 2.2 TI2V, over packed samples of any shapes.

Weights are those of `diffusers.WanTransformer3DModel`, under the same names. Float32 whatever the weights are:
timestep, time embedding, modulation, gates, statistics of norms, rotary angles, the residual stream (a switch), and
the head. Everything else computes in the dtype of the weights.

Legend: `B` samples, `S` tokens of one sample, `N` = sum of S, `D` hidden size, `G` segments (tokens that share a
modulation row), `M` = B * text_len context rows.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the name that PyTorch's own documentation uses)

from adaptiveload.kernels.adaln import adaln
from adaptiveload.models.attention import AttentionCalls, attention_batches
from adaptiveload.models.config import ModelConfig
from adaptiveload.models.layers import (
    Attention,
    Block,
    FeedForward,
    LinearFp32,
    PatchEmbedding,
    TextEmbedder,
    TimeEmbedder,
    recompute_levels,
)
from adaptiveload.models.lora import own_parameters
from adaptiveload.models.packing import PackedBatch, pad_text
from adaptiveload.models.rope import rotary_table
from adaptiveload.models.sharded import draw_whole


@dataclass
class WanConfig(ModelConfig):
    """Sizes of a Wan transformer, named as in diffusers; the defaults are Wan 2.1 T2V-1.3B.

    Attributes:
        freq_dim: Dims of the timestep's sinusoid.
        ffn_dim: Inner dims of the feed-forward part.
        qk_norm: Only "rms_norm_across_heads", which all released Wan weights use.
        cross_attn_norm: Only True, likewise.
        rope_max_seq_len: Most tokens along one axis.
    """

    diffusers_class: ClassVar[str] = "WanTransformer3DModel"

    freq_dim: int = 256
    ffn_dim: int = 8960
    qk_norm: str = "rms_norm_across_heads"
    cross_attn_norm: bool = True
    rope_max_seq_len: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ffn_dim < 1:
            raise ValueError(f"model.ffn_dim={self.ffn_dim} must be at least 1")
        if self.qk_norm != "rms_norm_across_heads" or not self.cross_attn_norm:
            raise ValueError(
                f"qk_norm {self.qk_norm!r} with cross_attn_norm {self.cross_attn_norm} is not supported; "
                "Wan 2.1 has 'rms_norm_across_heads' with true"
            )
        if self.attention_head_dim % 2 or self.attention_head_dim < 6:
            raise ValueError(
                f"attention_head_dim {self.attention_head_dim} must be even and at least 6: three axes turn"
            )
        if self.freq_dim % 2:
            raise ValueError(f"freq_dim {self.freq_dim} must be even: half cosines, half sines")

    def to_diffusers(self) -> dict[str, Any]:
        """Arguments of `diffusers.WanTransformer3DModel`; what diffusers does not know is left out."""
        values = asdict(self)
        not_theirs = (
            "architecture",
            "text_len",
            "residual_fp32",
            "spatial_stride",
            "pretrained",
            "trainable",
            "frozen",
        )
        return {name: value for name, value in values.items() if name not in not_theirs}

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> Self:
        """From the `config.json` of a diffusers checkpoint.

        Raises:
            ValueError: If the checkpoint has an image branch (I2V, FLF2V), which this model lacks.
        """
        for name in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
            if config.get(name) is not None:
                raise ValueError(f"{name} is {config[name]}: only text-to-video checkpoints are supported")
        return cls(**{field.name: config[field.name] for field in fields(cls) if field.name in config})


@dataclass(frozen=True)
class PackedLayout:
    """What all blocks need to know about a micro-batch, worked out once on the host."""

    segment_offsets: torch.Tensor
    self_attention: AttentionCalls
    cross_attention: AttentionCalls


class Modulation(nn.Module):
    """The learned modulation tables of all blocks and of the head, in float32.

    They live here, not in the blocks, so that FSDP can shard them in a unit of their own that stays float32: a unit
    has one dtype, and that of the blocks is bfloat16. `diffusers_name` says where diffusers has them.
    """

    def __init__(self, num_layers: int, hidden_size: int):
        super().__init__()
        self.blocks = nn.ParameterList([nn.Parameter(torch.empty(1, 6, hidden_size)) for _ in range(num_layers)])
        self.head = nn.Parameter(torch.empty(1, 2, hidden_size))

    def forward(self, embedding: torch.Tensor, projection: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Modulation of every block, a list of [G, 6, D], and of the head, [G, 2, D].

        Fresh sums, because FSDP frees the tables themselves after this call.

        Args:
            embedding: Of the timestep [G, D]; the head adds this one, not its projection.
            projection: Of the embedding [G, 6 * D].
        """
        projection = projection.unflatten(1, (6, -1))  # [G, 6, D]
        return [table.float() + projection for table in self.blocks], self.head.float() + embedding.unsqueeze(1)


class WanBlock(Block):
    """Self attention, cross attention and feed-forward, each behind a norm that first adds what came before it."""

    def __init__(self, config: WanConfig):
        super().__init__()
        size, eps = config.hidden_size, config.eps
        self.eps = eps
        self.attn1 = Attention(size, config.num_attention_heads, eps)
        self.attn2 = Attention(size, config.num_attention_heads, eps)
        # Before the cross attention. In the original Wan code this one is norm3, and the feed-forward's is norm2.
        self.norm2 = nn.LayerNorm(size, eps)
        self.ffn = FeedForward(size, config.ffn_dim)

    def _forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        gate: torch.Tensor | None,
        modulation: tuple[torch.Tensor, ...],
        context: torch.Tensor,
        rotary: torch.Tensor,
        layout: PackedLayout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual stream and the last sublayer's output, which is still to be added to it.

        Args:
            x: Residual stream [N, D].
            y: Output of the previous block, to be added to `x` times `gate` [N, D]; None in the first block.
            gate: [G, D], float32.
            modulation: shift, scale, gate of the self attention, shift, scale of the feed-forward; float32 [G, D] each.
            context: Embedded text [M, D].
            rotary: complex64 [N, hd / 2].
            layout: Of the micro-batch.
        """
        shift1, scale1, gate1, shift2, scale2 = modulation
        common = {
            "segment_offsets": layout.segment_offsets,
            "eps": self.eps,
            "out_dtype": self.attn1.to_q.weight.dtype,
        }
        h, x = adaln(x, y=y, gate=gate, scale=scale1, shift=shift1, **common)
        y = self.attn1(h, h, layout.self_attention, rotary)
        h, x = adaln(x, y=y, gate=gate1, weight=self.norm2.weight, bias=self.norm2.bias, **common)
        y = self.attn2(h, context, layout.cross_attention)  # neither modulated nor gated
        h, x = adaln(x, y=y, scale=scale2, shift=shift2, **common)
        return x, self.ffn(h)


class WanTransformer(nn.Module):
    """Wan 2.1 T2V or 2.2 TI2V transformer; a new one is initialised for training from scratch.

    State dicts have the keys of `diffusers.WanTransformer3DModel` and load both ways. Parameter names differ in the
    modulation tables alone; `diffusers_name` translates. `torch.distributed.checkpoint.state_dict` looks keys up as
    attributes and cannot follow that: hand it `dict(model.named_parameters())` instead.
    """

    def __init__(self, config: WanConfig):
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.patch_embedding = PatchEmbedding(config.in_channels, size, config.patch_size)
        self.condition_embedder = nn.ModuleDict(
            {
                "time_embedder": TimeEmbedder(config.freq_dim, size),
                "time_proj": LinearFp32(size, 6 * size),
                "text_embedder": TextEmbedder(config.text_dim, size),
            }
        )
        self.modulation = Modulation(config.num_layers, size)
        self.blocks = nn.ModuleList([WanBlock(config) for _ in range(config.num_layers)])
        self.proj_out = LinearFp32(size, config.out_channels * config.patch_volume)
        self.register_state_dict_post_hook(_to_diffusers_keys)
        self.register_load_state_dict_pre_hook(_from_diffusers_keys)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise for training from scratch, as Wan's own code does: the output of the new model is zero.

        One parameter after the other is drawn whole on the CPU, so that a sharded model starts with the same weights
        on any number of ranks and no rank holds them all. On the meta device nothing happens.

        Source: Wan2.1 wan/modules/model.py, `WanModel.init_weights`.
        """
        for name, parameter in self.named_parameters():
            draw_whole(parameter, partial(self._draw, name))

    def _draw(self, name: str, weight: torch.Tensor) -> None:
        if name.endswith(".bias") or name == "proj_out.weight":
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1)
        elif name.startswith("modulation."):
            weight.normal_(std=self.config.hidden_size**-0.5)
        elif "time_embedder" in name or "text_embedder" in name:
            weight.normal_(std=0.02)
        else:
            nn.init.xavier_uniform_(weight.flatten(1))  # a view; the patch embedding's kernel is flattened

    def diffusers_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in diffusers, those of adapters left out."""
        return {diffusers_name(name): parameter for name, parameter in own_parameters(self).items()}

    def fsdp_units(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """What `fully_shard` should wrap before the whole model: modules of one float32 unit, and the blocks.

        The first list is one unit (pass the list), to be gathered and reduced in float32; each block is a unit of its
        own. All of them need `cast_forward_inputs=False`.
        """
        embedder = self.condition_embedder
        fp32_modules = [embedder["time_embedder"], embedder["time_proj"], self.modulation, self.proj_out]
        return fp32_modules, list(self.blocks)

    def forward(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        batch: PackedBatch,
        recompute: str = "none",
        permille: int = 1000,
    ) -> torch.Tensor:
        """Predicted velocity of every token: float32 [N, out_channels*pf*py*px], in the token layout of the input.

        Args:
            latents: Noisy tokens [N, in_channels*pf*py*px].
            timestep: Of each segment, float32 [G] in [0, 1000].
            batch: Text, shapes and offsets of the samples; its latents are not read.
            recompute: "none"; "full" keeps only the inputs of a block and computes the rest again in backward,
                "attention" all but its attention.
            permille: Thousandths of the blocks that do so, the first ones; the others keep everything.

        Raises:
            ValueError: If a text is longer than `text_len`, a grid larger than `rope_max_seq_len`, or `recompute` is
                none of these.
            TypeError: If `timestep` is not float32.
        """
        self._check(batch)
        levels = recompute_levels(recompute, permille, len(self.blocks))
        config, embedder = self.config, self.condition_embedder
        dtype = self.patch_embedding.weight.dtype
        embedding = embedder["time_embedder"](timestep)  # [G, D]
        rows, head = self.modulation(embedding, embedder["time_proj"](F.silu(embedding)))
        context = embedder["text_embedder"](pad_text(batch, config.text_len, dtype))  # [M, D]
        rotary = rotary_table(batch.grids, config.attention_head_dim, latents.device)
        layout = PackedLayout(
            segment_offsets=batch.segment_offsets,
            self_attention=AttentionCalls(attention_batches(batch.seq_offsets)),
            cross_attention=AttentionCalls(attention_batches(batch.seq_offsets, config.text_len)),
        )
        x = self.patch_embedding(latents.to(dtype))  # [N, D]
        x = x.float() if config.residual_fp32 else x
        y = gate = None
        for block, block_rows, level in zip(self.blocks, rows, levels, strict=True):
            # unbind, not six indexings: the backward of each would zero-fill all six rows.
            *modulation, next_gate = block_rows.unbind(1)
            x, y = block(x, y, gate, tuple(modulation), context, rotary, layout, recompute=level)
            gate = next_gate
        shift, scale = head.unbind(1)
        offsets = batch.segment_offsets
        h, _ = adaln(
            x, y=y, gate=gate, scale=scale, shift=shift,
            segment_offsets=offsets, eps=config.eps, out_dtype=torch.float32,
        )  # fmt: skip
        return rearrange(self.proj_out(h), "n (p c) -> n (c p)", p=config.patch_volume)

    def _check(self, batch: PackedBatch) -> None:
        for key, grid in zip(batch.keys, batch.grids, strict=True):
            if max(grid) > self.config.rope_max_seq_len:
                raise ValueError(
                    f"sample {key}: token grid {grid} is larger than rope_max_seq_len {self.config.rope_max_seq_len}"
                )


def diffusers_name(name: str) -> str:
    """Name in diffusers of the parameter `name` of a `WanTransformer`."""
    if name == "modulation.head":
        return "scale_shift_table"
    if name.startswith("modulation.blocks."):
        return f"blocks.{name.removeprefix('modulation.blocks.')}.scale_shift_table"
    return name


def _to_diffusers_keys(model: WanTransformer, state: dict, prefix: str, _metadata: dict) -> None:
    _rename(state, prefix, {name: diffusers_name(name) for name, _ in model.named_parameters()})


def _from_diffusers_keys(model: WanTransformer, state: dict, prefix: str, *_) -> None:
    _rename(state, prefix, {diffusers_name(name): name for name, _ in model.named_parameters()})


def _rename(state: dict, prefix: str, names: dict[str, str]) -> None:
    for old, new in names.items():
        if old != new and prefix + old in state:
            state[prefix + new] = state.pop(prefix + old)
