"""What the configurations of all architectures share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

# What a block keeps for backward: everything, its inputs, or its inputs and the outputs of its attention.
RECOMPUTE_LEVELS = ("none", "full", "attention")


@dataclass
class ModelConfig:
    """Sizes of a transformer. The defaults are Wan 2.1 T2V-1.3B.

    Attributes:
        architecture: "wan" or "mmdit": which of them this configures; it decides about the further keys.
        patch_size: Latent frames, rows and columns in one token.
        num_attention_heads: Heads; times `attention_head_dim` gives the hidden size.
        attention_head_dim: Dims of one head.
        in_channels: Latent channels going in.
        out_channels: Latent channels coming out.
        text_dim: Dims of one text row.
        num_layers: Blocks.
        text_len: Most text rows of a sample. Wan pads shorter texts to it with zeros that are attended, as it was
            trained; mmdit pads nothing.
        eps: Of all norms.
        residual_fp32: Keep the residual stream in float32 (as Wan was trained), or in the dtype of the weights.
        spatial_stride: Pixels in one latent row or column of the VAE: 8, and 16 for Wan 2.2 TI2V's.
        pretrained: Folder of weights to start from, diffusers' or Wan's own; None draws new ones.
        trainable: Patterns of the parameters and modules that are trained, by their names in diffusers, such as
            `[blocks.*.attn1, "*.bias"]`; None trains all, or with `lora.rank` the adapters alone.
        frozen: Patterns of those that are not trained after all.
    """

    diffusers_class: ClassVar[str]

    architecture: str = "wan"
    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 12
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    num_layers: int = 30
    text_len: int = 512
    eps: float = 1e-6
    residual_fp32: bool = True
    spatial_stride: int = 8
    pretrained: str | None = None
    trainable: list[str] | None = None
    frozen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.architecture != type(self).architecture:
            raise ValueError(f"model.architecture={self.architecture!r} is not what {type(self).__name__} configures")
        self.patch_size = tuple(self.patch_size)
        for name in (
            "num_attention_heads",
            "in_channels",
            "out_channels",
            "text_dim",
            "num_layers",
            "text_len",
            "spatial_stride",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def patch_volume(self) -> int:
        """Latent positions in one token; times the channels gives the token size."""
        return math.prod(self.patch_size)

    def to_diffusers(self) -> dict[str, Any]:
        """Arguments of the diffusers class; what diffusers does not know is left out."""
        raise NotImplementedError

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> Self:
        """From the `config.json` of a diffusers checkpoint. Raises ValueError for what the model lacks."""
        raise NotImplementedError
