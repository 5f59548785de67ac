"""The dataset's table of contents: which sample lies where in which shard.

A dataset folder holds tar shards, `index.parquet` (one row a sample), `dataset.json` (what all samples share) and
`null_text.safetensors` (the embedding of the empty caption, for guidance). A row number is the sample's id.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from adaptiveload.data.storage import Storage
from adaptiveload.data.strings import StringColumn
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry, Shape

FORMAT_VERSION = 1
INDEX_NAME = "index.parquet"
INFO_NAME = "dataset.json"
NULL_TEXT_NAME = "null_text.safetensors"

_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("source", pa.string()),
        ("shard", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("frames", pa.int32()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("text_len", pa.int32()),
    ]
)


@dataclass(frozen=True)
class DatasetInfo:
    """What all samples of a dataset share.

    Attributes:
        codec: Name of the latent codec, such as "dct".
        normalization_hash: Hash of the codec's mean and std; latents under another one are another dataset.
        text_encoder: Name of the text encoder.
        text_dim: Length of one text embedding.
        num_samples: Rows of the index.
        captions: Names of the further captions that samples may have, beside the one that all have.
        shards: File name of each shard and its size in bytes.
        geometry: Latent channels, strides and patch.
        format_version: Layout of shards and index.
    """

    codec: str
    normalization_hash: str
    text_encoder: str
    text_dim: int
    num_samples: int
    shards: dict[str, int]
    captions: tuple[str, ...] = ()
    geometry: LatentGeometry = field(default_factory=LatentGeometry)
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """Everything that reading one sample takes, so that workers need no index.

    Attributes:
        key: Name of the sample inside its shard.
        source: Media file of origin.
        shard: File name of the shard.
        offset, size: The sample's bytes in the shard.
        shape: Pixel shape as stored.
        text_len: Rows of its longest text embedding.
        frames: Pixel frames to serve: the first ones of a clip, or all of them.
        dataset: Number of the dataset in a corpus of several.
    """

    key: str
    source: str
    shard: str
    offset: int
    size: int
    shape: Shape
    text_len: int
    frames: int
    dataset: int = 0

    @property
    def name(self) -> str:
        """The key; of a shorter prefix also its frames, because it is another sample than the whole clip."""
        return self.key if self.frames == self.shape.frames else f"{self.key}/{self.frames}"

    @property
    def served(self) -> Shape:
        """Pixel shape to serve."""
        return Shape(self.frames, *self.shape[1:])


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Rows of a dataset as columns of equal length.

    Attributes:
        root: Dataset folder or its URL.
        info: What all samples share.
        keys: Name of each sample inside its shard.
        sources: Media file of origin; samples of one file share it.
        shards: File name of the shard.
        offsets: int64 [n], first byte of the sample in the shard, tar header included.
        sizes: int64 [n], bytes up to the end of the sample's last member.
        frames: int32 [n], pixel frames; `heights` and `widths` likewise.
        heights: int32 [n].
        widths: int32 [n].
        text_lens: int32 [n], rows of the text embedding, of the longest of several.
    """

    root: str
    info: DatasetInfo
    keys: StringColumn
    sources: StringColumn
    shards: StringColumn
    offsets: np.ndarray
    sizes: np.ndarray
    frames: np.ndarray
    heights: np.ndarray
    widths: np.ndarray
    text_lens: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", str(self.root))
        for name in ("keys", "sources", "shards"):
            object.__setattr__(self, name, StringColumn.of(getattr(self, name)))

    @classmethod
    def read(cls, dataset_dir: str | Path) -> "ShardIndex":
        """Index of a dataset folder; `verify` compares it with the shards.

        Raises:
            ValueError: If the folder has no index, or one that is damaged, of another format version, or not of one
                piece with its `dataset.json`.
        """
        storage = Storage(dataset_dir)
        for name in (INDEX_NAME, INFO_NAME):
            if not storage.exists(name):
                raise ValueError(
                    f"no dataset in {dataset_dir}: {name} is missing; make one with `python -m scripts.prepare`, "
                    "or index existing shards with `python -m scripts.index_shards`"
                )
        info = _read_info(storage)
        try:
            source = pa.BufferReader(storage.read(INDEX_NAME)) if storage.is_remote else storage.path(INDEX_NAME)
            # Few shards and sources have many samples: their names are kept once.
            table = pq.read_table(source, columns=_SCHEMA.names, read_dictionary=["source", "shard"])
            columns = [_column(table[field.name], field.type) for field in _SCHEMA]
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ValueError(
                f"{storage.path(INDEX_NAME)} is damaged: {error}; `python -m scripts.index_shards` makes it again"
            ) from error
        if table.num_rows != info.num_samples:
            raise ValueError(
                f"{dataset_dir}: {INDEX_NAME} has {table.num_rows} rows, {INFO_NAME} says {info.num_samples}; "
                "`python -m scripts.index_shards` makes both again"
            )
        return cls(storage.root, info, *columns)

    def __len__(self) -> int:
        return len(self.keys)

    def shape(self, i: int) -> Shape:
        """Pixel shape of sample `i`."""
        return Shape(int(self.frames[i]), int(self.heights[i]), int(self.widths[i]))

    def place(self, i: int) -> SamplePlace:
        """What reading sample `i` takes."""
        shape = self.shape(i)
        numbers = (int(self.offsets[i]), int(self.sizes[i]))
        return SamplePlace(
            self.keys[i], self.sources[i], self.shards[i], *numbers, shape, int(self.text_lens[i]), shape.frames
        )

    def verify(self) -> None:
        """Check that the shards are those that were indexed and that every row makes sense; opens no shard.

        Raises:
            ValueError: If the index is empty; a shard is missing or has another size (named); a row points outside its
                shard, comes twice, has no text, or has a shape that does not fill whole tokens (key named).
        """
        if not len(self):
            raise ValueError(f"the index of {self.root} has no samples")
        self._verify_shards()
        sizes = np.array([self.info.shards.get(name, -1) for name in self.shards.names])
        ends = sizes[self.shards.codes]
        bad = (self.offsets < 0) | (self.sizes <= 0) | (self.offsets + self.sizes > ends) | (self.text_lens < 1)
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(
                f"{self.root}/{INDEX_NAME}: row {row} (key {self.keys[row]!r}) points to bytes {self.offsets[row]}+"
                f"{self.sizes[row]} of {self.shards[row]} ({ends[row]} bytes) with {self.text_lens[row]} rows of text"
            )
        places = pa.table({"shard": self.shards.codes, "key": self.keys.array})
        counts = places.group_by(["shard", "key"]).aggregate([([], "count_all")])
        if counts.num_rows < len(self):
            twin = counts.sort_by([("count_all", "descending")]).slice(0, 1).to_pylist()[0]
            raise ValueError(
                f"{self.root}/{INDEX_NAME}: key {twin['key']!r} comes twice in shard {self.shards.names[twin['shard']]}"
            )
        self.sample_table(self.info.geometry)

    def _verify_shards(self) -> None:
        storage = Storage(self.root)
        for name, size in self.info.shards.items():
            path = storage.path(name)
            try:
                found = storage.size(name)
            except FileNotFoundError:
                raise ValueError(f"shard {path} is missing; the index promises {size} bytes") from None
            if found != size:
                raise ValueError(
                    f"shard {path} has {found} bytes, the index promises {size}; if it was replaced on purpose, "
                    f"run `python -m scripts.index_shards {self.root}`"
                )

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything but the folder's place; a resumed run compares it."""
        digest = hashlib.blake2b(json.dumps(asdict(self.info), sort_keys=True).encode(), digest_size=16)
        for strings in (self.keys, self.sources, self.shards):
            strings.update_digest(digest)
        for numbers in (self.offsets, self.sizes, self.frames, self.heights, self.widths, self.text_lens):
            digest.update(np.ascontiguousarray(numbers, dtype="<i8").tobytes())
        return digest.hexdigest()

    def sample_table(self, geometry: LatentGeometry) -> SampleTable:
        """What the scheduler needs to know of the samples, in the same order. Raises as `SampleTable.from_columns`."""
        columns = (self.frames, self.heights, self.widths, self.text_lens)
        return SampleTable.from_columns(self.keys, self.sources, *columns, geometry)


def write_index(index: ShardIndex) -> None:
    """Write `index.parquet` and `dataset.json` into the local folder `index.root`, each whole or not at all.

    Ended between the two, the folder has no `dataset.json`: never one that belongs to another index.
    """
    root = Path(index.root)
    strings = [column.array for column in (index.keys, index.sources, index.shards)]
    numbers = (index.offsets, index.sizes, index.frames, index.heights, index.widths, index.text_lens)
    arrays = [column.cast(pa.string()) for column in strings]
    arrays += [pa.array(column, kind.type) for column, kind in zip(numbers, list(_SCHEMA)[3:], strict=True)]
    table, info = (root / f".{name}.{os.getpid()}" for name in (INDEX_NAME, INFO_NAME))
    pq.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA), table)
    info.write_text(json.dumps(asdict(index.info), indent=1) + "\n")
    (root / INFO_NAME).unlink(missing_ok=True)
    table.replace(root / INDEX_NAME)
    info.replace(root / INFO_NAME)


def _column(column: pa.ChunkedArray, kind: pa.DataType) -> StringColumn | np.ndarray:
    if column.null_count:
        raise KeyError("a value is missing")
    return StringColumn.of(column) if kind == pa.string() else pc.cast(column, kind).to_numpy()


def _read_info(storage: Storage) -> DatasetInfo:
    path = storage.path(INFO_NAME)
    try:
        values = json.loads(storage.read(INFO_NAME))
        version = values["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"{path}: format version {version}; this program reads {FORMAT_VERSION}")
        geometry = LatentGeometry.from_json(values.pop("geometry"))
        return DatasetInfo(**{**values, "captions": tuple(values.get("captions", ()))}, geometry=geometry)
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
