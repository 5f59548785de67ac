"""One pass over shards to make their index: tar and tensor headers and the small json members, no tensor data."""

import json
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from adaptiveload.data.index import (
    FORMAT_VERSION,
    INDEX_NAME,
    INFO_NAME,
    NULL_TEXT_NAME,
    DatasetInfo,
    ShardIndex,
)
from adaptiveload.data.reader import JSON_MEMBER, LATENTS_MEMBER
from adaptiveload.data.tar_scan import Problem, TarSample, scan_tar
from adaptiveload.scheduling.shapes import LatentGeometry, Shape

_SHARED = ("codec", "normalization_hash", "text_encoder", "format_version")


def index_shards(dataset_dir: str | Path) -> tuple[ShardIndex, list[Problem]]:
    """Index all `*.tar` of a folder, in the order of their names.

    Returns:
        The index of all usable samples (not yet written), and what was left out. If the folder has an index already,
        shards that are gone or hold fewer usable samples than it promises are among the problems.

    Raises:
        ValueError: If the folder has no shard, no usable sample, or no `null_text.safetensors`.
    """
    root = Path(dataset_dir)
    paths = sorted(root.glob("*.tar"))
    if not paths:
        raise ValueError(f"no shards (*.tar) in {root}")
    if not (root / NULL_TEXT_NAME).is_file():
        raise ValueError(f"{root / NULL_TEXT_NAME} (embedding of the empty caption) is missing")
    rows: list[tuple] = []
    shared: dict = {}
    problems: list[Problem] = []
    for path in paths:
        scan = scan_tar(path)
        problems += scan.problems
        with path.open("rb") as file:
            for sample in scan.samples:
                try:
                    rows.append(_row(file, path.name, sample, shared))
                except (ValueError, KeyError, TypeError) as error:
                    problems.append(Problem(f"{path.name}/{sample.key}", _reason(error)))
    if not rows:
        detail = "".join(f"\n  {problem.key}: {problem.reason}" for problem in problems[:5])
        raise ValueError(f"no usable sample in the {len(paths)} shards of {root}{detail}")
    sizes = {path.name: path.stat().st_size for path in paths}
    info = DatasetInfo(**shared, num_samples=len(rows), shards=sizes, geometry=LatentGeometry())
    index = ShardIndex(root, info, *_columns(rows))
    return index, problems + _lost_since(index)


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _columns(rows: list[tuple]) -> list[np.ndarray]:
    kinds = (object, object, object, np.int64, np.int64, np.int32, np.int32, np.int32, np.int32)
    return [np.array(column, dtype=kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]


def _row(file: BinaryIO, shard: str, sample: TarSample, shared: dict) -> tuple:
    """Index row of one sample. The first sample of a dataset sets `shared`; the others must agree with it."""
    meta = json.loads(_read(file, *sample.members[JSON_MEMBER]))
    latents, text = _tensor_shapes(file, *sample.members[LATENTS_MEMBER])
    shape = Shape(meta["frames"], meta["height"], meta["width"])
    expected = list(LatentGeometry().latent_size(shape))
    if latents != expected:
        raise ValueError(f"latents {latents}, but {shape} needs {expected}")
    if len(text) != 2 or not text[0]:
        raise ValueError(f"text {text} must have two axes and at least one row")
    if meta["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format version {meta['format_version']}; this program reads {FORMAT_VERSION}")
    for name, value in {**{name: meta[name] for name in _SHARED}, "text_dim": text[1]}.items():
        if shared.setdefault(name, value) != value:
            raise ValueError(f"{name} {value}, but samples before have {shared[name]}")
    return (sample.key, meta["source"], shard, sample.offset, sample.size, *shape, text[0])


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _tensor_shapes(file: BinaryIO, offset: int, size: int) -> tuple[list[int], list[int]]:
    """Shapes of `latents` and `text` from the safetensors header: 8 bytes of length, then JSON."""
    (length,) = struct.unpack("<Q", _read(file, offset, 8)) if size >= 8 else (0,)
    if not 0 < length <= size - 8:
        raise ValueError(f"{LATENTS_MEMBER} is damaged")
    header = json.loads(_read(file, offset + 8, length))
    return header["latents"]["shape"], header["text"]["shape"]


def _lost_since(index: ShardIndex) -> list[Problem]:
    """Shards that held more samples when the folder was indexed last."""
    if not all((index.root / name).is_file() for name in (INDEX_NAME, INFO_NAME)):
        return []
    before = dict(zip(*np.unique(ShardIndex.read(index.root).shards.astype(str), return_counts=True), strict=True))
    now = dict(zip(*np.unique(index.shards.astype(str), return_counts=True), strict=True))
    return [
        Problem(str(shard), f"{now.get(shard, 0)} usable samples, the last index promised {count}")
        for shard, count in before.items()
        if now.get(shard, 0) < count
    ]
