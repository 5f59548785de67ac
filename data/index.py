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
import pyarrow.parquet as pq

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
    geometry: LatentGeometry = field(default_factory=LatentGeometry)
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Rows of a dataset as columns of equal length.

    Attributes:
        root: Dataset folder.
        info: What all samples share.
        keys: str [n], name of the sample inside its shard.
        sources: str [n], media file of origin; samples of one file share it.
        shards: str [n], file name of the shard.
        offsets: int64 [n], first byte of the sample in the shard, tar header included.
        sizes: int64 [n], bytes up to the end of the sample's last member.
        frames: int32 [n], pixel frames; `heights` and `widths` likewise.
        heights: int32 [n].
        widths: int32 [n].
        text_lens: int32 [n], rows of the text embedding.
    """

    root: Path
    info: DatasetInfo
    keys: np.ndarray
    sources: np.ndarray
    shards: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    frames: np.ndarray
    heights: np.ndarray
    widths: np.ndarray
    text_lens: np.ndarray

    @classmethod
    def read(cls, dataset_dir: str | Path) -> "ShardIndex":
        """Index of a dataset folder; `verify` compares it with the shards.

        Raises:
            ValueError: If the folder has no index, or one that is damaged, of another format version, or not of one
                piece with its `dataset.json`.
        """
        root = Path(dataset_dir)
        for name in (INDEX_NAME, INFO_NAME):
            if not (root / name).is_file():
                raise ValueError(
                    f"no dataset in {root}: {name} is missing; make one with `python -m scripts.prepare`, "
                    "or index existing shards with `python -m scripts.index_shards`"
                )
        info = _read_info(root / INFO_NAME)
        try:
            table = pq.read_table(root / INDEX_NAME).select(_SCHEMA.names).cast(_SCHEMA)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ValueError(f"{root / INDEX_NAME} is damaged: {error}") from error
        if table.num_rows != info.num_samples:
            raise ValueError(f"{root}: {INDEX_NAME} has {table.num_rows} rows, {INFO_NAME} says {info.num_samples}")
        return cls(root, info, *(column.to_numpy() for column in table.columns))

    def __len__(self) -> int:
        return len(self.keys)

    def shape(self, i: int) -> Shape:
        """Pixel shape of sample `i`."""
        return Shape(int(self.frames[i]), int(self.heights[i]), int(self.widths[i]))

    def verify(self) -> None:
        """Check that the shards are those that were indexed and that every row makes sense; opens no shard.

        Raises:
            ValueError: If the index is empty; a shard is missing or has another size (named); a row points outside its
                shard, comes twice, has no text, or has a shape that does not fill whole tokens (key named).
        """
        if not len(self):
            raise ValueError(f"the index of {self.root} has no samples")
        self._verify_shards()
        shards = pa.array(self.shards, pa.string()).dictionary_encode()
        sizes = np.array([self.info.shards.get(name, -1) for name in shards.dictionary.to_pylist()])
        ends = sizes[shards.indices.to_numpy()]
        bad = (self.offsets < 0) | (self.sizes <= 0) | (self.offsets + self.sizes > ends) | (self.text_lens < 1)
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(
                f"{self.root / INDEX_NAME}: row {row} (key {self.keys[row]!r}) points to bytes {self.offsets[row]}+"
                f"{self.sizes[row]} of {self.shards[row]} ({ends[row]} bytes) with {self.text_lens[row]} rows of text"
            )
        places = pa.table({"shard": shards, "key": pa.array(self.keys, pa.string())})
        counts = places.group_by(["shard", "key"]).aggregate([([], "count_all")])
        if counts.num_rows < len(self):
            twin = counts.sort_by([("count_all", "descending")]).slice(0, 1).to_pylist()[0]
            raise ValueError(f"{self.root / INDEX_NAME}: key {twin['key']!r} comes twice in shard {twin['shard']}")
        self.sample_table(self.info.geometry)

    def _verify_shards(self) -> None:
        for name, size in self.info.shards.items():
            path = self.root / name
            if not path.is_file():
                raise ValueError(f"shard {path} is missing; the index promises {size} bytes")
            found = path.stat().st_size
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
            digest.update("\0".join(strings).encode())
        for numbers in (self.offsets, self.sizes, self.frames, self.heights, self.widths, self.text_lens):
            digest.update(np.ascontiguousarray(numbers, dtype="<i8").tobytes())
        return digest.hexdigest()

    def sample_table(self, geometry: LatentGeometry) -> SampleTable:
        """What the scheduler needs to know of the samples, in the same order. Raises as `SampleTable.from_columns`."""
        columns = (self.frames, self.heights, self.widths, self.text_lens)
        return SampleTable.from_columns(self.keys, self.sources, *columns, geometry)


def write_index(index: ShardIndex) -> None:
    """Write `index.parquet` and `dataset.json` into `index.root`, each whole or not at all."""
    columns = (index.keys, index.sources, index.shards, index.offsets, index.sizes)
    columns += (index.frames, index.heights, index.widths, index.text_lens)
    arrays = [pa.array(column, kind.type) for column, kind in zip(columns, _SCHEMA, strict=True)]
    unfinished = index.root / f".{INDEX_NAME}.{os.getpid()}"
    pq.write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA), unfinished)
    unfinished.replace(index.root / INDEX_NAME)
    unfinished = index.root / f".{INFO_NAME}.{os.getpid()}"
    unfinished.write_text(json.dumps(asdict(index.info), indent=1) + "\n")
    unfinished.replace(index.root / INFO_NAME)


def _read_info(path: Path) -> DatasetInfo:
    try:
        values = json.loads(path.read_text())
        version = values["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"{path}: format version {version}; this program reads {FORMAT_VERSION}")
        geometry = values.pop("geometry")
        geometry = LatentGeometry(**{**geometry, "patch": tuple(geometry["patch"])})
        return DatasetInfo(**values, geometry=geometry)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
