"""A tiny Wan transformer with random weights, and samples of mixed shapes for it."""

import pytest
import torch

from adaptiveload.models.mmdit import MMDiTConfig, VideoMMDiT
from adaptiveload.models.packing import PackedSample
from adaptiveload.models.wan import WanConfig, WanTransformer

# Three samples of one grid, a second grid of the same S, three text lengths, pictures and clips.
GRIDS = [(1, 2, 3), (3, 4, 4), (1, 2, 3), (1, 3, 2), (1, 2, 3), (2, 3, 1), (3, 2, 2), (2, 2, 2)]


def make_config(**changes) -> WanConfig:
    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 96,
        "num_layers": 2,
        "text_len": 8,
    }
    return WanConfig(**(sizes | changes))


def randomize(model: torch.nn.Module, seed: int = 0, std: float = 0.1) -> None:
    """Random weights everywhere, so that no term of the forward pass is multiplied by zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.state_dict().items()):
            parameter.normal_(std=std, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)


def make_model(**changes) -> WanTransformer:
    model = WanTransformer(make_config(**changes))
    randomize(model)
    return model


def make_mmdit_model(**changes) -> VideoMMDiT:
    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "axes_dims_rope": (4, 10, 10),
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "num_layers": 3,
        "text_len": 8,
    }
    model = VideoMMDiT(MMDiTConfig(**(sizes | changes)))
    randomize(model)
    return model


def make_samples(config: WanConfig, grids=tuple(GRIDS), seed: int = 1) -> list[PackedSample]:
    generator = torch.Generator().manual_seed(seed)
    token_size = config.in_channels * config.patch_volume
    samples = []
    for index, grid in enumerate(grids):
        num_tokens = grid[0] * grid[1] * grid[2]
        samples.append(
            PackedSample(
                key=f"sample{index}",
                grid=grid,
                latents=torch.randn(num_tokens, token_size, generator=generator),
                noise=torch.randn(num_tokens, token_size, generator=generator),
                sigma=float(torch.rand((), generator=generator)),
                text=torch.randn(3 + index % 3, config.text_dim, generator=generator),
                weight=1 + index / 4,
                sample_id=index,
            )
        )
    return samples


@pytest.fixture
def config() -> WanConfig:
    return make_config()


@pytest.fixture
def model() -> WanTransformer:
    return make_model()


@pytest.fixture
def samples(config) -> list[PackedSample]:
    return make_samples(config)


@pytest.fixture
def make_wan():
    return make_model


@pytest.fixture
def make_mmdit():
    return make_mmdit_model


@pytest.fixture
def sample_maker():
    return make_samples
