"""Write random latents and captions in the shapes of a mix: a dataset to try a configuration before the data are there.

    python -m scripts.synthetic_data --mix configs/mixes/mixed.yaml --num-samples 500 --output mixed_latents

It costs what real data would: full-size latents, texts of many lengths. There is nothing to learn from it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.shard_writer import DatasetWriter
from adaptiveload.data.text import HashTextEncoder
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry

_VOCABULARY = 500  # words; their vectors are kept in memory


def write_dataset(mix: Path, num_samples: int, output: Path, encoder: HashTextEncoder, seed: int) -> int:
    """Write the dataset into the new folder `output`; returns its tokens. Every sample is a source of its own.

    Raises:
        ValueError: If `mix` is no mix, `num_samples` is not positive, or `output` exists.
    """
    geometry = LatentGeometry()
    table = SampleTable.from_mix(mix, num_samples, seed, geometry)
    if output.exists():
        raise ValueError(f"{output} exists: name a new folder")
    output.mkdir(parents=True)
    writer = DatasetWriter(output, DctCodec(), encoder, samples_per_shard=1000)
    rng = np.random.default_rng(seed)
    for i, shape in enumerate(table.shapes[number] for number in table.shape_ids):
        latents = rng.standard_normal(geometry.latent_size(shape), dtype=np.float32).astype(np.float16)
        words = rng.integers(0, _VOCABULARY, rng.integers(1, encoder.max_len))
        caption = " ".join(f"word{word}" for word in words)
        meta = {"frames": shape.frames, "height": shape.height, "width": shape.width, "fps": 16.0}
        writer.write(f"synthetic{i:06d}", f"synthetic{i:06d}", latents, caption, meta)
    writer.finish()
    return int(table.num_tokens.sum())


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", type=Path, required=True, help="YAML of shapes and their shares")
    parser.add_argument("--num-samples", type=int, required=True, help="samples of the dataset")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--text-dim", type=int, default=4096, help="dims of a text row (default 4096)")
    parser.add_argument("--text-len", type=int, default=512, help="rows of the longest text (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default 0)")
    options = parser.parse_args(argv)
    try:
        encoder = HashTextEncoder(options.text_dim, options.text_len)
        tokens = write_dataset(options.mix, options.num_samples, options.output, encoder, options.seed)
    except ValueError as error:
        sys.exit(f"synthetic_data: {error}")
    print(f"{options.num_samples} samples, {tokens} tokens: {options.output}")


if __name__ == "__main__":
    main()
