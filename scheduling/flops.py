"""FLOPs of the transformers from their sizes: matrix products only, two per multiply-add, as MFU counts them.

Legend: `S` tokens of a sample, `T` its text rows, `D` hidden size, `F` inner width of a feed-forward part, `L` blocks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelDims(ABC):
    """Sizes that decide the work and the memory. The defaults are what all Wan 2.1 text-to-video models share.

    Attributes:
        hidden_size: Width D of the residual stream.
        num_layers: Blocks L.
        num_heads: Attention heads; they do not change the count.
        text_dim: Width of the text encoder's rows.
        freq_dim: Width of the timestep's sinusoid.
        token_size: Latent elements of one input token.
        out_token_size: Latent elements of one predicted token.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    text_dim: int = 4096
    freq_dim: int = 256
    token_size: int = 64
    out_token_size: int = 64

    @property
    @abstractmethod
    def text_joins(self) -> bool:
        """Whether text rows are tokens of the sequence, so that a sample has S + T of them to compute."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Weights of the matrix products; biases, norms and tables (under 0.1 %) are left out."""

    @property
    @abstractmethod
    def linear_flops_per_token(self) -> int:
        """Forward FLOPs per token that do not grow with the sequence."""

    @property
    @abstractmethod
    def sample_flops(self) -> int:
        """Forward FLOPs per sample whatever its length."""

    @property
    @abstractmethod
    def block_token_bytes(self) -> int:
        """Bytes of one token in one block that backward needs, fp32 residual stream, bf16 else."""

    @property
    @abstractmethod
    def attention_token_bytes(self) -> int:
        """Bytes of the attention outputs of one token in one block, and of their fp32 logarithms of sums."""

    @property
    @abstractmethod
    def text_bytes(self) -> int:
        """Bytes of one sample's text in one block, where it is no part of the sequence."""

    @abstractmethod
    def forward_flops(self, num_tokens: int, text_len: int) -> int:
        """FLOPs of one forward pass over one sample of `num_tokens` tokens and `text_len` text rows."""

    @property
    def attention_flops_per_token_squared(self) -> int:
        """Forward FLOPs of self attention per token squared."""
        return 4 * self.num_layers * self.hidden_size

    def train_flops(self, num_tokens: int, text_len: int) -> int:
        """Model FLOPs of forward and backward, three times the forward; recompute is not counted."""
        return 3 * self.forward_flops(num_tokens, text_len)


@dataclass(frozen=True, kw_only=True)
class WanDims(ModelDims):
    """Of Wan's transformer.

    Attributes:
        ffn_dim: Inner width F of the feed-forward part.
        text_len: Text rows T that every sample attends to, padding included.
    """

    ffn_dim: int
    text_len: int = 512

    @property
    def text_joins(self) -> bool:
        """No: it is attended across, padded to one length."""
        return False

    @property
    def num_parameters(self) -> int:
        """See `ModelDims`."""
        d, f = self.hidden_size, self.ffn_dim
        block = 8 * d * d + 2 * d * f
        embed = d * (self.token_size + self.out_token_size + self.text_dim + self.freq_dim) + 8 * d * d
        return self.num_layers * block + embed

    @property
    def linear_flops_per_token(self) -> int:
        """Projections, cross attention, FFN, patches."""
        d, f, t = self.hidden_size, self.ffn_dim, self.text_len
        return self.num_layers * (12 * d * d + 4 * d * f + 4 * t * d) + 2 * d * (self.token_size + self.out_token_size)

    @property
    def sample_flops(self) -> int:
        """Keys and values of the text, text and time embedding."""
        d, t = self.hidden_size, self.text_len
        embed_text = 2 * t * (self.text_dim * d + d * d)
        embed_time = 2 * (self.freq_dim * d + 7 * d * d)
        return self.num_layers * 4 * t * d * d + embed_text + embed_time

    @property
    def block_token_bytes(self) -> int:
        """Measured with saved-tensor hooks on the fused block: 40 + 4 * F / D, times D."""
        return 40 * self.hidden_size + 4 * self.ffn_dim

    @property
    def attention_token_bytes(self) -> int:
        """Of self and cross attention."""
        return 2 * (2 * self.hidden_size + 4 * self.num_heads)

    @property
    def text_bytes(self) -> int:
        """A block's keys, as they are and normalised, and values; the embedded rows serve all blocks."""
        return self.text_len * 2 * 3 * self.hidden_size

    def forward_flops(self, num_tokens: int, text_len: int) -> int:
        """See `ModelDims`; `text_len` changes nothing, because every text is padded."""
        linear = self.linear_flops_per_token * num_tokens
        return linear + self.attention_flops_per_token_squared * num_tokens**2 + self.sample_flops


@dataclass(frozen=True, kw_only=True)
class MMDiTDims(ModelDims):
    """Of the dual-stream MMDiT, whose text rows go through as many layers as image tokens."""

    @property
    def text_joins(self) -> bool:
        """Yes, unpadded."""
        return True

    @property
    def num_parameters(self) -> int:
        """See `ModelDims`."""
        d = self.hidden_size
        embed = d * (self.token_size + self.out_token_size + self.text_dim + self.freq_dim) + 3 * d * d
        return self.num_layers * 36 * d * d + embed

    @property
    def linear_flops_per_token(self) -> int:
        """Projections and MLP of either stream, and patches; a text row's own embedding is little more."""
        d = self.hidden_size
        return self.num_layers * 24 * d * d + 2 * d * (self.token_size + self.out_token_size)

    @property
    def sample_flops(self) -> int:
        """Modulation of both streams in every block, and time embedding."""
        d = self.hidden_size
        return self.num_layers * 24 * d * d + 2 * (self.freq_dim * d + d * d) + 4 * d * d

    @property
    def block_token_bytes(self) -> int:
        """Measured with saved-tensor hooks: 46.3 * D."""
        return 46 * self.hidden_size

    @property
    def attention_token_bytes(self) -> int:
        """Of the joint attention."""
        return 2 * self.hidden_size + 4 * self.num_heads

    @property
    def text_bytes(self) -> int:
        """Nothing: its rows are tokens."""
        return 0

    def forward_flops(self, num_tokens: int, text_len: int) -> int:
        """See `ModelDims`. The last block's text ends at its attention."""
        d, joint = self.hidden_size, num_tokens + text_len
        blocks = self.num_layers * 24 * d * d * joint + self.attention_flops_per_token_squared * joint**2
        ends = 2 * num_tokens * d * (self.token_size + self.out_token_size) + 2 * text_len * self.text_dim * d
        return blocks + ends - 18 * text_len * d * d + self.sample_flops


WAN_1_3B = WanDims(hidden_size=1536, num_layers=30, num_heads=12, ffn_dim=8960)
WAN_14B = WanDims(hidden_size=5120, num_layers=40, num_heads=40, ffn_dim=13824)
MMDIT_1_4B = MMDiTDims(hidden_size=1536, num_layers=16, num_heads=12)
MMDIT_20B = MMDiTDims(hidden_size=3072, num_layers=60, num_heads=24, text_dim=3584)
MODELS: dict[str, ModelDims] = {
    "wan_1_3b": WAN_1_3B,
    "wan_14b": WAN_14B,
    "mmdit_1_4b": MMDIT_1_4B,
    "mmdit_20b": MMDIT_20B,
}
