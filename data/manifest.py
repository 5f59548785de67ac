"""Manifests: tables whose rows name a media file, a caption, and perhaps a part of the clip (CSV, JSONL, parquet).

Columns are found by name. Media: the first of `path`, `media`, `video`, `video_path`, `image`, `file`, `url` and
`videoID`. Text: `caption`; `caption_NAME` is a further caption called NAME. Part of a clip: `start` and `end`, in
seconds or as H:M:S, or `timestamp`, both as a list (Koala-36M). Every other column is kept beside the sample.
"""

import ast
import csv
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from adaptiveload.data.captions import clean_caption, scalars
from adaptiveload.data.media import VIDEO_SUFFIXES
from adaptiveload.data.raw import MEDIA_SUFFIXES, RawItem, Unit, digest_of
from adaptiveload.data.storage import is_url
from adaptiveload.data.tar_scan import Problem

MANIFEST_SUFFIXES = (".csv", ".jsonl", ".parquet")
_MEDIA_COLUMNS = ("path", "media", "video", "video_path", "image", "file", "url", "videoID")
_Place = tuple[int, int]  # byte of the first row (parquet: row group), rows


def manifest_units(path: Path, rows_per_unit: int, media_root: str | None) -> list[Unit]:
    """Units of one manifest; one pass over it. Raises ValueError if it cannot be read or lacks a column."""
    root = media_root or str(path.parent)
    try:
        columns, places, num_rows = (_parquet_places if path.suffix == ".parquet" else _text_places)(
            path, rows_per_unit
        )
    except (OSError, pa.ArrowException, csv.Error) as error:
        raise ValueError(f"manifest {path} cannot be read: {error}") from error
    media = next((name for name in _MEDIA_COLUMNS if name in columns), None)
    if media is None or "caption" not in columns:
        raise ValueError(f"manifest {path}: needs `caption` and one of {', '.join(_MEDIA_COLUMNS)}; it has {columns}")
    size, units, first = path.stat().st_size, [], 0
    for place, count in zip(places, num_rows, strict=True):
        name = f"{path.name} rows {first} to {first + count - 1}"
        read = partial(_read_rows, path, columns, place, first, count, media, root)
        units.append(Unit(name, digest_of(name, size, place), read, count))
        first += count
    return units


def _read_rows(
    path: Path, columns: list[str], place: Any, first: int, count: int, media: str, root: str
) -> Iterator[RawItem | Problem]:
    seen: set[str] = set()
    reader = _parquet_rows if path.suffix == ".parquet" else _text_rows
    for number, row in enumerate(reader(path, columns, place, count), start=first):
        label = f"{path.name} row {number}"
        try:
            if isinstance(row, Exception):
                raise ValueError(str(row))
            item = _item(row, media, root)
            label = item.name
            if item.name in seen:
                raise ValueError(f"comes twice in {path.name}; only the first is used")
            seen.add(item.name)
            yield item
        except ValueError as error:
            yield Problem(label, str(error))


def _item(row: dict[str, Any], media: str, root: str) -> RawItem:
    fields = {str(key): value for key, value in row.items() if key is not None}
    path = str(fields.pop(media) or "").strip()
    if not path:
        raise ValueError(f"`{media}` is empty")
    suffix = Path(path).suffix.lower()
    if suffix not in MEDIA_SUFFIXES:
        raise ValueError(f"`{media}` is {path!r}: {suffix or 'no suffix'} is no known kind of media")
    caption = fields.pop("caption")
    if not isinstance(caption, str):
        raise ValueError(f"`caption` is {caption!r}, not a text")
    more = {name: fields.pop(name) for name in list(fields) if name.startswith("caption_")}
    start_s, end_s = _part(fields)
    where = path if is_url(path) or Path(path).is_absolute() else f"{root.rstrip('/')}/{path}"
    is_part = start_s > 0 or end_s is not None
    return RawItem(
        name=f"{path}@{start_s:.3f}-{'end' if end_s is None else f'{end_s:.3f}'}" if is_part else path,
        source=path,
        path=where,
        is_video=suffix in VIDEO_SUFFIXES,
        caption=clean_caption(caption),
        captions={name.removeprefix("caption_"): clean_caption(text) for name, text in more.items() if text},
        fields=scalars(fields),
        start_s=start_s,
        end_s=end_s,
    )


def _part(fields: dict[str, Any]) -> tuple[float, float | None]:
    start, end = fields.pop("start", None), fields.pop("end", None)
    stamp = fields.pop("timestamp", None)
    if stamp not in (None, ""):
        try:
            start, end = ast.literal_eval(stamp) if isinstance(stamp, str) else stamp
        except (ValueError, SyntaxError, TypeError) as error:
            raise ValueError(f"`timestamp` is {stamp!r}, expected two times") from error
    start_s = 0.0 if start in (None, "") else _seconds(start)
    end_s = None if end in (None, "") else _seconds(end)
    if start_s < 0 or (end_s is not None and not end_s > start_s):
        raise ValueError(f"start {start!r} and end {end!r} are no part of a clip")
    return start_s, end_s


def _seconds(value: Any) -> float:
    try:
        seconds = 0.0
        for part in str(value).strip().split(":"):
            seconds = 60 * seconds + float(part)
    except ValueError as error:
        raise ValueError(f"time {value!r} is neither seconds nor H:M:S") from error
    if not math.isfinite(seconds):
        raise ValueError(f"time {value!r} is not a finite number")
    return seconds


def _parquet_places(path: Path, rows_per_unit: int) -> tuple[list[str], list[Any], list[int]]:
    file = pq.ParquetFile(path)
    places, counts = [], []
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        for first in range(0, rows, rows_per_unit):
            places.append((group, first))
            counts.append(min(rows_per_unit, rows - first))
    return file.schema_arrow.names, places, counts


def _parquet_rows(path: Path, columns: list[str], place: _Place, count: int) -> Iterator[dict[str, Any]]:
    group, first = place
    yield from pq.ParquetFile(path).read_row_group(group).slice(first, count).to_pylist()


def _text_places(path: Path, rows_per_unit: int) -> tuple[list[str], list[Any], list[int]]:
    """Byte at which each unit begins, found by reading all rows once."""
    columns: list[str] = []
    places, counts = [], []
    position = _Lines(path)
    rows = _parse(path, position)
    begin = 0
    if path.suffix == ".csv":
        columns = next(rows, [])
        columns[:1] = [name.removeprefix("\ufeff") for name in columns[:1]]
        begin = position.offset
    pending = 0
    for row in rows:
        if isinstance(row, dict):
            columns += [name for name in row if name not in columns]
        pending += 1
        if pending == rows_per_unit:
            places.append(begin)
            counts.append(pending)
            begin, pending = position.offset, 0
    if pending:
        places.append(begin)
        counts.append(pending)
    return columns, places, counts


def _text_rows(path: Path, columns: list[str], place: int, count: int) -> Iterator[dict[str, Any] | Exception]:
    rows = _parse(path, _Lines(path, place))
    for row, _ in zip(rows, range(count), strict=False):
        if isinstance(row, list):
            if len(row) != len(columns):
                yield ValueError(f"{len(row)} cells, the header has {len(columns)}")
            else:
                yield dict(zip(columns, row, strict=True))
        else:
            yield row


def _parse(path: Path, lines: "_Lines") -> Iterator[Any]:
    if path.suffix == ".csv":
        csv.field_size_limit(2**24)
        yield from (row for row in csv.reader(lines) if row)
        return
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line.removeprefix("\ufeff"))
            yield row if isinstance(row, dict) else ValueError(f"the row is no JSON object: {line[:40]!r}")
        except json.JSONDecodeError as error:
            yield ValueError(f"the row is broken JSON: {error}")


class _Lines:
    """Lines of a text file from a byte on, counting bytes. What is not UTF-8 becomes surrogates."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    def __iter__(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                self.offset += len(line)
                yield line.decode("utf-8", errors="surrogateescape")
