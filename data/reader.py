"""Random access to samples: one range read of a shard each, at home in DataLoader workers."""

import io
import json
import tarfile
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from adaptiveload.data.index import NULL_TEXT_NAME, DatasetInfo, SamplePlace, ShardIndex
from adaptiveload.data.storage import Storage
from adaptiveload.data.tar_scan import split_name
from adaptiveload.scheduling.shapes import LatentGeometry, Shape

LATENTS_MEMBER = "latents.safetensors"
JSON_MEMBER = "json"
TEXT_TENSOR = "text"  # embedding of the caption that every sample has; further ones are `text.NAME`
FIRST_CAPTION = "caption"  # its name where captions are chosen by name


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
        stored_latents: [C, F, Y, X], normalised, in the 16-bit type that they are stored in, else in float32.
        stored_texts: For each of its captions by name [text_len, text_dim], trimmed, likewise; always a "caption".
        captions: The texts that were embedded, by the same names.
        meta: Everything in the sample's JSON member, such as `start_frame` and `box` of its cut.
    """

    key: str
    source: str
    stored_latents: torch.Tensor
    stored_texts: dict[str, torch.Tensor]
    captions: dict[str, str]
    meta: dict[str, Any]

    @property
    def latents(self) -> np.ndarray:
        """float32 [C, F, Y, X], normalised."""
        return self.stored_latents.float().numpy()

    @property
    def text(self) -> np.ndarray:
        """Embedding of the first caption, float32 [text_len, text_dim]."""
        return self.stored_texts[FIRST_CAPTION].float().numpy()

    @property
    def caption(self) -> str:
        """The first caption."""
        return self.captions[FIRST_CAPTION]


class SampleReader:
    """Reads samples of one dataset. Picklable, and small: it keeps no index."""

    def __init__(self, index: ShardIndex) -> None:
        self.info = replace(index.info, shards={})  # a large dataset has tens of thousands
        self.storage = Storage(index.root)

    def read(self, place: SamplePlace) -> Sample:
        """The sample at `place`, cut to its first `place.frames` frames.

        Raises:
            SampleError: If the bytes cannot be read or parsed, belong to another sample or normalisation, have another
                shape than the index says, or hold a NaN or infinity.
        """
        try:
            data = self.storage.read_range(place.shard, place.offset, place.size)
            members = _members(data, place.key)
            sample = parse_sample(place.key, members, self.info, place.shape, place.text_len)
            if sample.source != place.source:
                raise ValueError(f"source {sample.source!r}, the index says {place.source!r}")
            return first_frames(sample, place.frames, self.info.geometry)
        except KeyError as error:
            raise SampleError(place.key, f"{place.shard}: {error.args[0]} is missing") from error
        except (OSError, ValueError, TypeError, tarfile.TarError, safetensors.SafetensorError) as error:
            raise SampleError(place.key, f"{place.shard}: {error}") from error

    def null_text(self) -> torch.Tensor:
        """Embedding of the empty caption, [len, text_dim], as stored. Raises ValueError if it cannot be read."""
        return read_null_text(self.storage, self.info.text_dim)


def read_null_text(storage: Storage, text_dim: int) -> torch.Tensor:
    """Embedding of the empty caption, [len, text_dim], as stored. Raises ValueError if it cannot be read."""
    path = storage.path(NULL_TEXT_NAME)
    try:
        text = _as_stored(safetensors.torch.load(storage.read(NULL_TEXT_NAME))["text"])
    except (OSError, KeyError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} (embedding of the empty caption) cannot be read: {error}") from error
    if text.ndim != 2 or text.shape[1] != text_dim:
        raise ValueError(f"{path}: shape {list(text.shape)}, expected [len, {text_dim}]")
    return text


def parse_sample(key: str, members: dict[str, bytes], info: DatasetInfo, shape: Shape, text_len: int) -> Sample:
    """Sample from its members, held against what is known of it.

    Raises:
        KeyError: If a member, tensor or field is missing.
        ValueError, TypeError, SafetensorError: If something is damaged or is not as `info`, `shape` or `text_len` say.
    """
    meta = json.loads(members[JSON_MEMBER])
    if meta["normalization_hash"] != info.normalization_hash:
        raise ValueError(f"normalisation {meta['normalization_hash']}, the dataset has {info.normalization_hash}")
    tensors = safetensors.torch.load(members[LATENTS_MEMBER])
    latents = _as_stored(tensors["latents"])
    expected = info.geometry.latent_size(shape)
    if latents.shape != expected:
        raise ValueError(f"latents {list(latents.shape)}, the index says {list(expected)}")
    captions = {FIRST_CAPTION: meta["caption"], **meta.get("captions", {})}
    texts = {
        name: _as_stored(tensors[TEXT_TENSOR if name == FIRST_CAPTION else f"{TEXT_TENSOR}.{name}"])
        for name in captions
    }
    if any(text.ndim != 2 or text.shape[1] != info.text_dim for text in texts.values()) or text_len != max(
        len(text) for text in texts.values()
    ):
        raise ValueError(
            f"text {[list(text.shape) for text in texts.values()]}, the index says {[text_len, info.text_dim]}"
        )
    if not all(_is_finite(tensor) for tensor in (latents, *texts.values())):
        raise ValueError("NaN or infinity in latents or text")
    return Sample(key, meta["source"], latents, texts, captions, meta)


def first_frames(sample: Sample, frames: int, geometry: LatentGeometry) -> Sample:
    """The first `frames` pixel frames (4k+1) of a sample.

    Valid because the VAE is causal: a latent frame has seen no pixel frame after its own. Only prefixes are.
    """
    latent_frames = (frames - 1) // geometry.temporal_stride + 1
    return replace(sample, stored_latents=sample.stored_latents[:, :latent_frames])


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit floats as they are: half the bytes on their way to the GPU, and exact there. All else in float32."""
    return tensor if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.float()


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite: in the types of `_as_stored` these have all bits of the exponent set.

    Tests of floats are slow for 16 bits, and turning 1 MB of them into float32 takes as long as reading it.
    """
    if tensor.dtype == torch.float32:
        return bool(np.isfinite(tensor.numpy()).all())
    exponent = 0x7C00 if tensor.dtype == torch.float16 else 0x7F80
    return bool(((tensor.view(torch.int16).numpy() & exponent) != exponent).all())


def _members(data: bytes, key: str) -> dict[str, bytes]:
    """Extension and bytes of each member in a sample's byte range."""
    members = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for member in tar:
            found, extension = split_name(member.name)
            if found != key:
                raise ValueError(f"sample {found!r} lies where the index says {key!r}")
            # tarfile would copy it in pieces of 16 KiB.
            members[extension] = data[member.offset_data : member.offset_data + member.size]
    return members
