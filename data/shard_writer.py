"""Writing a dataset: samples to shards, then the index."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import webdataset

from adaptiveload.data.index import FORMAT_VERSION, NULL_TEXT_NAME, ShardIndex, write_index
from adaptiveload.data.indexer import IndexBuilder
from adaptiveload.data.latent_codecs import LatentCodec
from adaptiveload.data.reader import FIRST_CAPTION, JSON_MEMBER, LATENTS_MEMBER, TEXT_TENSOR
from adaptiveload.data.storage import Storage
from adaptiveload.data.text import TextEncoder


class DatasetWriter:
    """Writes `KEY.latents.safetensors` (latents fp16, text bf16) and `KEY.json` of each sample into tar shards.

    Equal samples give equal bytes: the shards carry no time of writing.

    Args:
        root: Existing folder that holds no dataset yet.
        codec: Codec of the latents.
        text_encoder: Embeds the captions.
        samples_per_shard: A new shard is begun after this many samples, or 1 GB.
        prefix: Of the shards' names, so that several processes can write into one folder.
    """

    def __init__(
        self, root: Path, codec: LatentCodec, text_encoder: TextEncoder, samples_per_shard: int, prefix: str = "shard"
    ):
        self.root = root
        self._prefix = prefix
        self._texts: dict[tuple[str, ...], list[np.ndarray]] = {}
        self._text_encoder = text_encoder
        self._shared = {
            "codec": codec.name,
            "normalization_hash": codec.normalization_hash,
            "text_encoder": text_encoder.name,
            "format_version": FORMAT_VERSION,
            "geometry": asdict(codec.geometry),
        }
        self._writer = webdataset.ShardWriter(
            f"{root}/{prefix}-%06d.tar", maxcount=samples_per_shard, maxsize=1e9, verbose=0, mtime=0
        )

    def write(
        self,
        key: str,
        source: str,
        latents: np.ndarray,
        caption: str,
        meta: dict[str, Any],
        captions: dict[str, str] | None = None,
    ) -> None:
        """Add one sample.

        Args:
            key: Unique name without dots.
            source: Media file of origin.
            latents: fp16 [C, F, Y, X], finite.
            caption: Text to embed and to keep.
            meta: `frames`, `height` and `width` in pixels, and whatever else to keep beside the sample.
            captions: Further captions by name, to choose from in training.
        """
        captions = captions or {}
        assert FIRST_CAPTION not in captions
        assert not any("." in name for name in captions)
        texts = self._embed((caption, *captions.values()))
        names = [TEXT_TENSOR, *(f"{TEXT_TENSOR}.{name}" for name in captions)]
        tensors = {"latents": torch.from_numpy(np.ascontiguousarray(latents))}
        tensors |= {name: _bf16(text) for name, text in zip(names, texts, strict=True)}
        meta = {**meta, **self._shared, "source": source, "caption": caption}
        if captions:
            meta["captions"] = captions
        self._writer.write(
            {
                "__key__": key,
                LATENTS_MEMBER: safetensors.torch.save(tensors),
                JSON_MEMBER: json.dumps(meta).encode(),
            }
        )

    def finish(self) -> ShardIndex:
        """Close the shards and write the index. Raises ValueError if a shard does not read back whole."""
        self.close()
        write_null_text(self.root, self._text_encoder)
        index = self.index()
        write_index(index)
        return index

    def index(self) -> ShardIndex:
        """Index of the closed shards of this writer. Raises ValueError if one does not read back whole."""
        storage, builder = Storage(self.root), IndexBuilder()
        for name in storage.names(".tar"):
            if name.startswith(f"{self._prefix}-"):
                builder.add_shard(storage, name)
        if builder.problems:
            raise ValueError(f"{builder.problems[0].key} does not read back: {builder.problems[0].reason}")
        return builder.index(str(self.root))

    def close(self) -> None:
        """Close the shards without an index, after a failure; a second call does nothing."""
        self._writer.finish()  # ShardWriter.close cannot be called twice

    def _embed(self, captions: tuple[str, ...]) -> list[np.ndarray]:
        """Embeddings of the captions; the cuts of one item share them."""
        if captions not in self._texts:
            self._texts = {captions: self._text_encoder.encode(captions)}
        return self._texts[captions]


def write_null_text(root: Path, text_encoder: TextEncoder) -> None:
    """Write the embedding of the empty caption of the dataset in `root`."""
    (null_text,) = text_encoder.encode([""])
    (root / NULL_TEXT_NAME).write_bytes(safetensors.torch.save({"text": _bf16(null_text)}))


def _bf16(text: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(text).to(torch.bfloat16)
