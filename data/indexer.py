"""One pass over shards to make their index: tar and tensor headers and the small json members, no tensor data."""

import json
import struct
from typing import Any, BinaryIO

import numpy as np

from adaptiveload.data.index import (
    FORMAT_VERSION,
    INDEX_NAME,
    INFO_NAME,
    NULL_TEXT_NAME,
    DatasetInfo,
    ShardIndex,
)
from adaptiveload.data.reader import JSON_MEMBER, LATENTS_MEMBER, TEXT_TENSOR
from adaptiveload.data.storage import Storage
from adaptiveload.data.strings import StringColumn
from adaptiveload.data.tar_scan import Problem, TarSample, iter_tar
from adaptiveload.scheduling.shapes import LatentGeometry, Shape

_LONGEST_HEADER = 2**20  # of a safetensors file; ours have some hundred bytes
_SHARED = ("codec", "normalization_hash", "text_encoder", "format_version")


class IndexBuilder:
    """Collects rows shard by shard. The first sample sets what all must have in common."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.shards: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._shared: dict[str, Any] = {}
        self._captions: dict[str, None] = {}
        self._parts: list[list[StringColumn | np.ndarray]] = []

    def add_shard(self, storage: Storage, name: str) -> None:
        """Index one shard of `storage`. Raises OSError if it cannot be read at all."""
        self.shards[name] = storage.size(name)
        rows: list[tuple[Any, ...]] = []
        with storage.open(name) as file:
            for found in iter_tar(file, name, _load_headers):
                if isinstance(found, Problem):
                    self.problems.append(found)
                    continue
                try:
                    rows.append(self._row(name, found))
                except (ValueError, KeyError, TypeError) as error:
                    self.problems.append(Problem(f"{name}/{found.key}", _reason(error)))
        if rows:
            self.num_rows += len(rows)
            self._parts.append(_columns(rows))

    def index(self, root: str) -> ShardIndex:
        """The index of all rows. Raises ValueError if there are none."""
        if not self.num_rows:
            detail = "".join(f"\n  {problem.key}: {problem.reason}" for problem in self.problems[:5])
            raise ValueError(f"no usable sample in the {len(self.shards)} shards of {root}{detail}")
        captions = tuple(sorted(self._captions))
        info = DatasetInfo(
            **self._shared,
            num_samples=self.num_rows,
            shards=self.shards,
            captions=captions,
        )
        columns = [
            StringColumn.concatenate(parts) if isinstance(parts[0], StringColumn) else np.concatenate(parts)
            for parts in zip(*self._parts, strict=True)
        ]
        return ShardIndex(root, info, *columns)

    def _row(self, shard: str, sample: TarSample) -> tuple[Any, ...]:
        meta = json.loads(sample.data[JSON_MEMBER])
        latents, texts = tensor_shapes(sample.data[LATENTS_MEMBER], sample.members[LATENTS_MEMBER][1])
        shape = Shape(meta["frames"], meta["height"], meta["width"])
        geometry = LatentGeometry.from_json(meta["geometry"]) if "geometry" in meta else LatentGeometry()
        expected = list(geometry.latent_size(shape))
        if latents != expected:
            raise ValueError(f"latents {latents}, but {shape} needs {expected}")
        for text in texts.values():
            if len(text) != 2 or not text[0] or text[1] != texts[TEXT_TENSOR][1]:
                raise ValueError(f"text {text} must have two axes, at least one row, and one width")
        if meta["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {meta['format_version']}; this program reads {FORMAT_VERSION}")
        shared = {**{name: meta[name] for name in _SHARED}, "text_dim": texts[TEXT_TENSOR][1], "geometry": geometry}
        for name, value in shared.items():
            if self._shared.setdefault(name, value) != value:
                raise ValueError(f"{name} {value}, but samples before have {self._shared[name]}")
        self._captions |= dict.fromkeys(name.removeprefix(f"{TEXT_TENSOR}.") for name in texts if name != TEXT_TENSOR)
        longest = max(text[0] for text in texts.values())
        return (sample.key, meta["source"], shard, sample.offset, sample.size, *shape, longest)


def index_shards(dataset_dir: str) -> tuple[ShardIndex, list[Problem]]:
    """Index all `*.tar` of a folder or URL, in the order of their names, in one pass from front to back.

    Returns:
        The index of all usable samples (not yet written), and what was left out. If the folder has an index already,
        shards that are gone or hold fewer usable samples than it promises are among the problems; one that cannot be
        read is a problem named `index.parquet`, which leaves nothing out.

    Raises:
        ValueError: If the folder has no shard, no usable sample, or no `null_text.safetensors`.
    """
    storage = Storage(dataset_dir)
    names = storage.names(".tar")
    if not names:
        raise ValueError(f"no shards (*.tar) in {dataset_dir}")
    if not storage.exists(NULL_TEXT_NAME):
        raise ValueError(f"{storage.path(NULL_TEXT_NAME)} (embedding of the empty caption) is missing")
    builder = IndexBuilder()
    for name in names:
        builder.add_shard(storage, name)
    index = builder.index(storage.root)
    return index, builder.problems + _lost_since(index, storage)


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _columns(rows: list[tuple[Any, ...]]) -> list[StringColumn | np.ndarray]:
    kinds = (str, str, str, np.int64, np.int64, np.int32, np.int32, np.int32, np.int32)
    return [
        StringColumn.of(column) if kind is str else np.array(column, dtype=kind)
        for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)
    ]


def _load_headers(extension: str, member: BinaryIO) -> bytes:
    """The json whole; of the tensors only their header: 8 bytes of length, then JSON."""
    if extension == JSON_MEMBER:
        return member.read()
    if extension != LATENTS_MEMBER:
        return b""
    head = member.read(8)
    (length,) = struct.unpack("<Q", head) if len(head) == 8 else (0,)
    return head + member.read(min(length, _LONGEST_HEADER))


def tensor_shapes(head: bytes, size: int) -> tuple[list[int], dict[str, list[int]]]:
    """Shape of `latents`, and of each text, from the first bytes of a safetensors member of `size` bytes."""
    (length,) = struct.unpack("<Q", head[:8]) if len(head) >= 8 else (0,)
    if not 0 < length <= size - 8 or len(head) < 8 + length:
        raise ValueError(f"{LATENTS_MEMBER} is damaged")
    header = json.loads(head[8 : 8 + length])
    texts = {name: header[name]["shape"] for name in header if name.split(".")[0] == TEXT_TENSOR}
    if TEXT_TENSOR not in texts:
        raise KeyError(TEXT_TENSOR)
    return header["latents"]["shape"], texts


def _lost_since(index: ShardIndex, storage: Storage) -> list[Problem]:
    """Shards that held more samples when the folder was indexed last."""
    if not all(storage.exists(name) for name in (INDEX_NAME, INFO_NAME)):
        return []
    try:
        last = ShardIndex.read(index.root)
    except ValueError as error:
        return [Problem(INDEX_NAME, f"the last index does not tell what it promised: {error}")]
    before, now = _counts(last), _counts(index)
    return [
        Problem(shard, f"{now.get(shard, 0)} usable samples, the last index promised {count}")
        for shard, count in before.items()
        if now.get(shard, 0) < count
    ]


def _counts(index: ShardIndex) -> dict[str, int]:
    names = index.shards.names
    return dict(zip(names, np.bincount(index.shards.codes, minlength=len(names)).tolist(), strict=True))
