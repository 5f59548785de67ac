"""A small real dataset and a tiny run configuration, shared by the tests of training and of the command line."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.shard_writer import DatasetWriter
from adaptiveload.data.text import HashTextEncoder
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.distributed import Ranks

ROOT = Path(__file__).parent.parent
SHAPES = (Shape(1, 32, 32), Shape(1, 32, 48), Shape(5, 32, 32), Shape(9, 48, 32), Shape(5, 64, 64), Shape(13, 64, 64))
NUM_SAMPLES, NUM_SOURCES = 60, 15


# What launches ranks or compiles for minutes goes first, so that both workers of `make test` end together.
LONG_FIRST = ("end_to_end", "kernels", "training", "data")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In order of `LONG_FIRST`, else as collected."""
    folders = {folder: place for place, folder in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: folders.get(item.path.parent.name, len(folders)))


def write_dataset(root: Path) -> Path:
    """Shards of smooth random latents in several shapes, 4 to 64 tokens, with captions."""
    root.mkdir(parents=True)
    writer = DatasetWriter(root, DctCodec(), HashTextEncoder(dim=16, max_len=8), samples_per_shard=25)
    rng = np.random.default_rng(0)
    for i in range(NUM_SAMPLES):
        shape = SHAPES[i % len(SHAPES)]
        size = LatentGeometry().latent_size(shape)
        latents = rng.standard_normal((16, 1, 1, 1)) + 0.3 * rng.standard_normal(size)
        meta = {"frames": shape.frames, "height": shape.height, "width": shape.width, "fps": 16.0}
        writer.write(f"sample{i:03d}", f"clip{i % NUM_SOURCES}", latents.astype(np.float16), f"clip number {i}", meta)
    writer.finish()
    return root


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """This process as the only rank, for what needs no launch."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(0, 1, torch.device("cpu"), dist.new_group(backend="gloo"))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small dataset. Read-only: copy it before damaging it."""
    return write_dataset(tmp_path_factory.mktemp("data") / "latents")


@pytest.fixture(scope="session")
def run_config(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """YAML of a tiny fp32 run on the small dataset, warm-up off."""
    config = {
        "name": "tiny",
        "output_dir": str(tmp_path_factory.mktemp("runs")),
        "max_steps": 20,
        "precision": "fp32",
        "data": {"path": str(dataset), "held_out_share": 0.1, "num_workers": 0},
        "model": {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "ffn_dim": 48,
            "num_layers": 2,
            "text_dim": 16,
            "text_len": 8,
            "freq_dim": 16,
        },
        "schedule": {"samples_per_step": 12, "memory_limit_tokens": 128, "rank_speed": "off"},
        "cost": {"adaptive": False},  # plans that do not depend on how busy the machine is
        "optimizer": {"lr": 1e-3, "warmup_steps": 0},
        "checkpoint": {"every_steps": 5},
        "evaluation": {"every_steps": 10},
        "tracking": {"wandb": "disabled"},
    }
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
