"""Random access to samples: one range read of a shard each, at home in DataLoader workers."""

import io
import json
import os
import tarfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors
import safetensors.torch

from adaptiveload.data.index import NULL_TEXT_NAME, ShardIndex
from adaptiveload.data.tar_scan import split_name

LATENTS_MEMBER = "latents.safetensors"
JSON_MEMBER = "json"

_MAX_OPEN_SHARDS = 64  # per process, far below the usual limit of 1024 open files


class SampleError(Exception):
    """A sample that cannot be used, and why. Picklable, so that it crosses from DataLoader workers."""

    def __init__(self, key: str, reason: str):
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"sample {self.key!r}: {self.reason}"


@dataclass(frozen=True)
class Sample:
    """One sample as stored.

    Attributes:
        key: Name in its shard.
        source: Media file of origin.
        latents: float32 [C, F, Y, X], normalised.
        text: float32 [text_len, text_dim], trimmed.
        caption: The text that was embedded.
        meta: Everything in the sample's JSON member, such as `start_frame` and `box` of its cut.
    """

    key: str
    source: str
    latents: np.ndarray
    text: np.ndarray
    caption: str
    meta: dict[str, Any]


class SampleReader:
    """Reads samples of an index by row number. Picklable; shards are opened when first needed."""

    def __init__(self, index: ShardIndex):
        self.index = index
        self._open_shards: OrderedDict[str, io.FileIO] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["index"])

    def read(self, i: int) -> Sample:
        """Sample of row `i`.

        Raises:
            SampleError: If the bytes cannot be read or parsed, belong to another sample or normalisation, have another
                shape than the index says, or hold a NaN or infinity.
        """
        key = self.index.keys[i]
        try:
            return self._parse(i, self._read_range(i))
        except KeyError as error:
            raise SampleError(key, f"{self.index.shards[i]}: {error.args[0]} is missing") from error
        except (OSError, ValueError, TypeError, tarfile.TarError, safetensors.SafetensorError) as error:
            raise SampleError(key, f"{self.index.shards[i]}: {error}") from error

    def null_text(self) -> np.ndarray:
        """Embedding of the empty caption, float32 [len, text_dim]. Raises ValueError if it cannot be read."""
        path = self.index.root / NULL_TEXT_NAME
        try:
            text = safetensors.torch.load_file(path)["text"].float().numpy()
        except (OSError, KeyError, safetensors.SafetensorError) as error:
            raise ValueError(f"{path} (embedding of the empty caption) cannot be read: {error}") from error
        if text.ndim != 2 or text.shape[1] != self.index.info.text_dim:
            raise ValueError(f"{path}: shape {list(text.shape)}, expected [len, {self.index.info.text_dim}]")
        return text

    def _read_range(self, i: int) -> bytes:
        # pread has no file position, so forked workers may share the descriptor.
        offset, size = int(self.index.offsets[i]), int(self.index.sizes[i])
        data = os.pread(self._shard(self.index.shards[i]).fileno(), size, offset)
        if len(data) != size:
            raise ValueError(f"{len(data)} of {size} bytes at {offset}: the shard is shorter than its index says")
        return data

    def _shard(self, name: str) -> io.FileIO:
        file = self._open_shards.pop(name, None) or open(self.index.root / name, "rb", buffering=0)  # noqa: SIM115
        self._open_shards[name] = file
        if len(self._open_shards) > _MAX_OPEN_SHARDS:
            self._open_shards.popitem(last=False)[1].close()
        return file

    def _parse(self, i: int, data: bytes) -> Sample:
        key, info = self.index.keys[i], self.index.info
        members = _members(data, key)
        meta = json.loads(members[JSON_MEMBER])
        if meta["normalization_hash"] != info.normalization_hash:
            raise ValueError(f"normalisation {meta['normalization_hash']}, the dataset has {info.normalization_hash}")
        tensors = safetensors.torch.load(members[LATENTS_MEMBER])
        latents, text = tensors["latents"].float().numpy(), tensors["text"].float().numpy()
        expected = info.geometry.latent_size(self.index.shape(i))
        if latents.shape != expected:
            raise ValueError(f"latents {list(latents.shape)}, the index says {list(expected)}")
        if text.shape != (self.index.text_lens[i], info.text_dim):
            raise ValueError(f"text {list(text.shape)}, the index says {[int(self.index.text_lens[i]), info.text_dim]}")
        if not (np.isfinite(latents).all() and np.isfinite(text).all()):
            raise ValueError("NaN or infinity in latents or text")
        return Sample(key, self.index.sources[i], latents, text, meta["caption"], meta)


def _members(data: bytes, key: str) -> dict[str, bytes]:
    """Extension and bytes of each member in a sample's byte range."""
    members = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            found, extension = split_name(member.name)
            if found != key:
                raise ValueError(f"sample {found!r} lies where the index says {key!r}")
            members[extension] = tar.extractfile(member).read()
    return members
