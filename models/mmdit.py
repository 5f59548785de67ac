"""A dual-stream video MMDiT over packed samples of any shapes and text lengths: Qwen-Image's blocks, with frames.

Weights are those of `diffusers.QwenImageTransformer2DModel`, under the same names; frames need no new ones. Image and
text have weights of their own and meet in joint attention, each sample's text with its own image, nothing padded.
Float32 whatever the weights are: timestep, time embedding, gates and sums of the modulation, statistics of norms,
rotary angles, both residual streams (a switch), and the head. Everything else, the projections of the modulation in
each block included, computes in the dtype of the weights.

Legend: `B` samples, `S` image tokens of one sample, `N` = sum of S, `T` text rows of one sample, `M` = sum of T, `D`
hidden size, `H` heads, `G` segments of image tokens (that share a modulation row).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (the name that PyTorch's own documentation uses)

from adaptiveload.kernels.adaln import adaln
from adaptiveload.kernels.qk_norm_rope import qk_norm_rope
from adaptiveload.models.attention import AttentionBatch, VarlenBatch, joint_attention_calls, packed_attention
from adaptiveload.models.config import ModelConfig
from adaptiveload.models.layers import Block, FeedForward, LinearFp32, TimeEmbedder, recompute_levels
from adaptiveload.models.lora import own_parameters
from adaptiveload.models.packing import PackedBatch, to_device
from adaptiveload.models.rope import joint_rotary_tables
from adaptiveload.models.sharded import draw_whole

# Qwen-Image has it fixed.
FREQ_DIM = 256
MLP_RATIO = 4


@dataclass
class MMDiTConfig(ModelConfig):
    """Sizes of a `VideoMMDiT`; the defaults are Qwen-Image's 20B, with the text encoder's width of its own.

    Attributes:
        axes_dims_rope: Dims of a head that turn with frames, rows and columns; together `attention_head_dim`.
    """

    diffusers_class: ClassVar[str] = "QwenImageTransformer2DModel"

    architecture: str = "mmdit"
    num_attention_heads: int = 24
    text_dim: int = 3584
    num_layers: int = 60
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.axes_dims_rope = tuple(self.axes_dims_rope)
        if sum(self.axes_dims_rope) != self.attention_head_dim or any(dim % 2 for dim in self.axes_dims_rope):
            raise ValueError(
                f"model.axes_dims_rope={list(self.axes_dims_rope)} must be even and add up to "
                f"model.attention_head_dim={self.attention_head_dim}"
            )
        if self.patch_size[0] != 1 or self.patch_size[1] != self.patch_size[2]:
            raise ValueError(f"model.patch_size={list(self.patch_size)}: mmdit takes [1, p, p]")
        if self.eps != 1e-6:
            raise ValueError(f"model.eps={self.eps}: mmdit has 1e-6, as Qwen-Image")

    def to_diffusers(self) -> dict[str, Any]:
        """Arguments of `diffusers.QwenImageTransformer2DModel`; what diffusers does not know is left out."""
        return {
            "patch_size": self.patch_size[1],
            "in_channels": self.in_channels * self.patch_volume,
            "out_channels": self.out_channels,
            "num_layers": self.num_layers,
            "attention_head_dim": self.attention_head_dim,
            "num_attention_heads": self.num_attention_heads,
            "joint_attention_dim": self.text_dim,
            "axes_dims_rope": self.axes_dims_rope,
        }

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> Self:
        """From the `config.json` of a diffusers checkpoint.

        Raises:
            ValueError: If the checkpoint has parts of Qwen-Image's edit or layered models, which this model lacks.
        """
        for name in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"):
            if config.get(name):
                raise ValueError(f"{name} is {config[name]}: only text-to-image checkpoints are supported")
        patch = config["patch_size"]
        return cls(
            patch_size=(1, patch, patch),
            in_channels=config["in_channels"] // patch**2,
            out_channels=config["out_channels"] or config["in_channels"],
            num_layers=config["num_layers"],
            attention_head_dim=config["attention_head_dim"],
            num_attention_heads=config["num_attention_heads"],
            text_dim=config["joint_attention_dim"],
            axes_dims_rope=tuple(config["axes_dims_rope"]),
        )


@dataclass(frozen=True)
class JointLayout:
    """What all blocks need to know about a micro-batch, worked out once on the host.

    Attributes:
        segment_offsets: Of image tokens, as in `PackedBatch`.
        text_offsets: Of text rows, a sample each: all of them share a modulation row.
        lengths: T and S of each sample in turn: the pieces of the joint sequence.
        attention: Calls over the joint sequence.
    """

    segment_offsets: torch.Tensor
    text_offsets: torch.Tensor
    lengths: tuple[int, ...]
    attention: list[AttentionBatch | VarlenBatch]

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device, dtype: torch.dtype) -> Self:
        """Layout of `batch`, whose attention runs on `device` in `dtype`."""
        pairs = torch.stack([batch.text_offsets.diff(), batch.seq_offsets.diff()], dim=1)
        joint_offsets = torch.cat([pairs.new_zeros(1), pairs.sum(1).cumsum(0)])
        attention = joint_attention_calls(joint_offsets, device, dtype)
        return cls(batch.segment_offsets, batch.text_offsets, tuple(pairs.flatten().tolist()), attention)

    def join(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Text [M, ...] and image [N, ...] as [M + N, ...]: each sample's text, then its image."""
        pairs = zip(text.split(self.lengths[::2]), image.split(self.lengths[1::2]), strict=True)
        return torch.cat([piece for pair in pairs for piece in pair])

    @torch.compiler.disable  # it would compile anew for every number of samples
    def attend(
        self, text: tuple[torch.Tensor, ...], image: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Text [M, D] and image [N, D] after joint attention, from query, key and value of either, [.., H, hd]."""
        joint = (self.join(*pair) for pair in zip(text, image, strict=True))
        return self.part(packed_attention(*joint, self.attention))

    def part(self, joint: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inverse of `join`."""
        pieces = joint.split(self.lengths)
        return torch.cat(pieces[::2]), torch.cat(pieces[1::2])


class JointAttention(nn.Module):
    """Attention of image and text together, with weights for each, and RMSNorm of queries and keys in each head."""

    def __init__(self, config: MMDiTConfig, feeds_text: bool):
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.eps = config.num_attention_heads, config.eps
        self.feeds_text = feeds_text
        # Their weights only: `qk_norm_rope` computes.
        self.norm_q = nn.RMSNorm(config.attention_head_dim, config.eps)
        self.norm_k = nn.RMSNorm(config.attention_head_dim, config.eps)
        self.to_q = nn.Linear(size, size)
        self.to_k = nn.Linear(size, size)
        self.to_v = nn.Linear(size, size)
        self.add_k_proj = nn.Linear(size, size)
        self.add_v_proj = nn.Linear(size, size)
        self.add_q_proj = nn.Linear(size, size)
        self.to_out = nn.ModuleList([nn.Linear(size, size)])
        self.to_add_out = nn.Linear(size, size)
        self.norm_added_q = nn.RMSNorm(config.attention_head_dim, config.eps)
        self.norm_added_k = nn.RMSNorm(config.attention_head_dim, config.eps)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], layout: JointLayout
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Image [N, D] and text [M, D] after attention; no text where nothing reads it.

        Args:
            image: [N, D].
            text: [M, D].
            rotary: Of image and text, complex64 [N or M, hd / 2].
            layout: Of the micro-batch.
        """
        image_rotary, text_rotary = rotary
        query, key, value = (self._heads(linear(image)) for linear in (self.to_q, self.to_k, self.to_v))
        query, key = qk_norm_rope(query, key, self.norm_q.weight, self.norm_k.weight, image_rotary, self.eps)
        text_query, text_key, text_value = (
            self._heads(linear(text)) for linear in (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        )
        text_query, text_key = qk_norm_rope(
            text_query, text_key, self.norm_added_q.weight, self.norm_added_k.weight, text_rotary, self.eps
        )
        text, image = layout.attend((text_query, text_key, text_value), (query, key, value))
        return self.to_out[0](image), self.to_add_out(text) if self.feeds_text else None

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (self.num_heads, -1))  # [N or M, H, hd]


class Modulation(nn.ModuleList):
    """Shift, scale and gate of attention and MLP from a time embedding; the list keeps diffusers' name, `1`."""

    def __init__(self, hidden_size: int):
        super().__init__([nn.Identity(), nn.Linear(hidden_size, 6 * hidden_size)])

    def forward(self, embedding: torch.Tensor) -> list[torch.Tensor]:
        """Six of float32 [G, D] from SiLU of the embedding, float32 [G, D]."""
        linear = self[1]
        rows = linear(embedding.to(linear.weight.dtype)).float()
        # The last outlives the block: FSDP wants no views there.
        *parts, gate = rows.unflatten(1, (6, -1)).unbind(1)
        return [*parts, gate.clone()]


class MMDiTBlock(Block):
    """Joint attention and two MLPs, each behind a norm that first adds what came before it to its stream.

    The last block's text is read by nothing: diffusers computes what follows its attention and drops it, here it is
    left out. Its weights (`to_add_out`, `txt_mlp`) are there all the same and get no gradient.
    """

    def __init__(self, config: MMDiTConfig, is_last: bool):
        super().__init__()
        size = config.hidden_size
        self.eps = config.eps
        self.img_mod = Modulation(size)
        self.attn = JointAttention(config, feeds_text=not is_last)
        self.img_mlp = FeedForward(size, MLP_RATIO * size)
        self.txt_mod = Modulation(size)
        self.txt_mlp = FeedForward(size, MLP_RATIO * size)

    def _forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None,
        gate: torch.Tensor | None,
        text_x: torch.Tensor,
        text_y: torch.Tensor | None,
        text_gate: torch.Tensor | None,
        embedding: torch.Tensor,
        text_embedding: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        layout: JointLayout,
    ) -> tuple[torch.Tensor | None, ...]:
        """Both streams, each with the last sublayer's output and its gate, which are still to be added to it.

        Args:
            x: Residual stream of the image [N, D].
            y: Output of the previous block, to be added to `x` times `gate` [N, D]; None in the first block.
            gate: float32 [G, D].
            text_x: Residual stream of the text [M, D].
            text_y: As `y` [M, D].
            text_gate: As `gate` [B, D].
            embedding: SiLU of the time embedding of each segment, float32 [G, D].
            text_embedding: Of each sample [B, D].
            rotary: Of image and text.
            layout: Of the micro-batch.
        """
        common = {"eps": self.eps, "out_dtype": self.attn.to_q.weight.dtype}
        image, text = {"segment_offsets": layout.segment_offsets}, {"segment_offsets": layout.text_offsets}
        shift1, scale1, gate1, shift2, scale2, gate2 = self.img_mod(embedding)
        text_shift1, text_scale1, text_gate1, text_shift2, text_scale2, text_gate2 = self.txt_mod(text_embedding)
        h, x = adaln(x, y=y, gate=gate, scale=scale1, shift=shift1, **image, **common)
        text_h, text_x = adaln(text_x, y=text_y, gate=text_gate, scale=text_scale1, shift=text_shift1, **text, **common)
        y, text_y = self.attn(h, text_h, rotary, layout)
        h, x = adaln(x, y=y, gate=gate1, scale=scale2, shift=shift2, **image, **common)
        if text_y is None:
            return x, self.img_mlp(h), gate2, None, None, None
        text_h, text_x = adaln(
            text_x, y=text_y, gate=text_gate1, scale=text_scale2, shift=text_shift2, **text, **common
        )
        return x, self.img_mlp(h), gate2, text_x, self.txt_mlp(text_h), text_gate2


class HeadModulation(nn.Module):
    """Modulation of the last norm, in float32. Scale comes first here, unlike in the blocks."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = LinearFp32(hidden_size, 2 * hidden_size)

    def forward(self, embedding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and shift, float32 [G, D] each, from SiLU of the embedding [G, D]."""
        rows = self.linear(embedding).unflatten(1, (2, -1))
        return rows[:, 0].clone(), rows[:, 1].clone()


class VideoMMDiT(nn.Module):
    """Dual-stream video transformer; a new one is initialised for training from scratch.

    State dicts are those of `diffusers.QwenImageTransformer2DModel`, and so are parameter names.
    """

    def __init__(self, config: MMDiTConfig):
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.time_text_embed = nn.ModuleDict({"timestep_embedder": TimeEmbedder(FREQ_DIM, size)})
        self.txt_norm = nn.RMSNorm(config.text_dim, config.eps)
        self.img_in = nn.Linear(config.in_channels * config.patch_volume, size)
        self.txt_in = nn.Linear(config.text_dim, size)
        last = config.num_layers - 1
        self.transformer_blocks = nn.ModuleList([MMDiTBlock(config, i == last) for i in range(config.num_layers)])
        self.norm_out = HeadModulation(size)
        self.proj_out = LinearFp32(size, config.out_channels * config.patch_volume)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise for training from scratch: blocks pass their input on, and the output of the new model is zero.

        AdaLN-Zero, as DiT and SD3 do it; Qwen-Image's own initialisation is not published. Parameters are drawn one
        after the other, as in `WanTransformer.init_weights`.

        Source: DiT, section 3.2.
        """
        for name, parameter in self.named_parameters():
            draw_whole(parameter, partial(self._draw, name))

    @staticmethod
    def _draw(name: str, weight: torch.Tensor) -> None:
        if name.endswith(".bias") or "_mod." in name or name.startswith(("norm_out.", "proj_out.")):
            weight.zero_()
        elif weight.ndim == 1:
            weight.fill_(1)  # norms
        elif "timestep_embedder" in name:
            weight.normal_(std=0.02)
        else:
            nn.init.xavier_uniform_(weight)

    def diffusers_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in diffusers; those of adapters are left out."""
        return own_parameters(self)

    def fsdp_units(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """What `fully_shard` should wrap before the whole model, as `WanTransformer.fsdp_units`."""
        return [self.time_text_embed["timestep_embedder"], self.norm_out, self.proj_out], list(self.transformer_blocks)

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
            timestep: Of each segment, float32 [G] in [0, 1000]. Text goes by its sample's last segment, the noisy one.
            batch: Text, shapes and offsets of the samples; its latents are not read.
            recompute: "none"; "full" keeps only the inputs of a block and computes the rest again in backward,
                "attention" all but its attention.
            permille: Thousandths of the blocks that do so, the first ones; the others keep everything.

        Raises:
            ValueError: If a sample has no text rows or more than `text_len`, or `recompute` is none of these.
            TypeError: If `timestep` is not float32.
        """
        self._check(batch)
        levels = recompute_levels(recompute, permille, len(self.transformer_blocks))
        dtype = self.img_in.weight.dtype
        device = latents.device
        layout = JointLayout.of(batch, device, dtype)
        text_lens = batch.text_offsets.diff().tolist()
        rotary = joint_rotary_tables(batch.grids, text_lens, self.config.axes_dims_rope, device)
        embedding = F.silu(self.time_text_embed["timestep_embedder"](timestep))  # [G, D]
        last_segments = torch.searchsorted(batch.segment_offsets, batch.seq_offsets[1:]) - 1
        text_embedding = embedding.index_select(0, to_device(last_segments, device))  # [B, D]
        x = self.img_in(latents.to(dtype))  # [N, D]
        text_x = self.txt_in(self.txt_norm(batch.text.to(dtype)))  # [M, D]
        if self.config.residual_fp32:
            x, text_x = x.float(), text_x.float()
        y = gate = text_y = text_gate = None
        for block, level in zip(self.transformer_blocks, levels, strict=True):
            x, y, gate, text_x, text_y, text_gate = block(
                x, y, gate, text_x, text_y, text_gate, embedding, text_embedding, rotary, layout, recompute=level
            )
        scale, shift = self.norm_out(embedding)
        offsets = batch.segment_offsets
        h, _ = adaln(
            x, y=y, gate=gate, scale=scale, shift=shift,
            segment_offsets=offsets, eps=self.config.eps, out_dtype=torch.float32,
        )  # fmt: skip
        return self.proj_out(h)

    def _check(self, batch: PackedBatch) -> None:
        for key, length in zip(batch.keys, batch.text_offsets.diff().tolist(), strict=True):
            if not 1 <= length <= self.config.text_len:
                raise ValueError(
                    f"sample {key}: {length} text rows; mmdit takes 1 to text_len = {self.config.text_len}"
                )
