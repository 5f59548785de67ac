"""FLOPs of Wan's transformer from its sizes: matrix products only, two per multiply-add, as MFU counts them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDims:
    """Sizes that decide the FLOPs. The defaults are what all Wan 2.1 text-to-video models share.

    Attributes:
        hidden_size: Width D of the residual stream.
        num_layers: Blocks L.
        num_heads: Attention heads; they do not change the count.
        ffn_dim: Inner width F of the feed-forward part.
        text_len: Text rows T that every sample attends to, padding included.
        text_dim: Width of the text encoder's rows.
        freq_dim: Width of the timestep's sinusoid.
        token_size: Latent elements of one input token.
        out_token_size: Latent elements of one predicted token.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    text_len: int = 512
    text_dim: int = 4096
    freq_dim: int = 256
    token_size: int = 64
    out_token_size: int = 64

    @property
    def num_parameters(self) -> int:
        """Weights of the matrix products; biases, norms and tables (under 0.1 %) are left out."""
        d, f = self.hidden_size, self.ffn_dim
        block = 8 * d * d + 2 * d * f
        embed = d * (self.token_size + self.out_token_size + self.text_dim + self.freq_dim) + 8 * d * d
        return self.num_layers * block + embed


WAN_1_3B = ModelDims(hidden_size=1536, num_layers=30, num_heads=12, ffn_dim=8960)
WAN_14B = ModelDims(hidden_size=5120, num_layers=40, num_heads=40, ffn_dim=13824)
MODELS = {"wan_1_3b": WAN_1_3B, "wan_14b": WAN_14B}


def wan_linear_flops_per_token(dims: ModelDims) -> int:
    """Forward FLOPs per token that do not grow with the sequence: projections, cross attention, FFN, patches."""
    d, f, t = dims.hidden_size, dims.ffn_dim, dims.text_len
    return dims.num_layers * (12 * d * d + 4 * d * f + 4 * t * d) + 2 * d * (dims.token_size + dims.out_token_size)


def wan_attention_flops_per_token_squared(dims: ModelDims) -> int:
    """Forward FLOPs of self attention per token squared."""
    return 4 * dims.num_layers * dims.hidden_size


def wan_sample_flops(dims: ModelDims) -> int:
    """Forward FLOPs per sample whatever its length: keys and values of the text, text and time embedding."""
    d, t = dims.hidden_size, dims.text_len
    embed_text = 2 * t * (dims.text_dim * d + d * d)
    embed_time = 2 * (dims.freq_dim * d + 7 * d * d)
    return dims.num_layers * 4 * t * d * d + embed_text + embed_time


def wan_forward_flops(dims: ModelDims, num_tokens: int) -> int:
    """FLOPs of one forward pass over one sample of `num_tokens` tokens, text and time embedding included."""
    linear = wan_linear_flops_per_token(dims) * num_tokens
    attention = wan_attention_flops_per_token_squared(dims) * num_tokens**2
    return linear + attention + wan_sample_flops(dims)


def wan_train_flops(dims: ModelDims, num_tokens: int) -> int:
    """Model FLOPs of forward and backward, three times the forward; recompute is not counted."""
    return 3 * wan_forward_flops(dims, num_tokens)
