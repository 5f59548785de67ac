"""What a run trains on: one dataset or a weighted mix of several, as one table of samples.

A sample comes once an epoch, or as often as `repeats` or `weight` say. A weight is a share of the draws: it becomes
repeats, the smallest of which is 1, so that no sample is left out. A dataset whose repeats are no whole number
repeats a seeded choice of its samples once more than the others.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch

from adaptiveload.data.index import DatasetInfo, SamplePlace, ShardIndex
from adaptiveload.data.reader import FIRST_CAPTION, Sample, SampleReader
from adaptiveload.data.strings import StringColumn
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry

_SHARED = ("codec", "normalization_hash", "text_encoder", "text_dim")


@dataclass
class SourceConfig:
    """One dataset of a mix; an entry of `data.sources`.

    Attributes:
        path: Folder or URL of the dataset.
        weight: Share of the draws, relative to the other sources; all sources have one or none has.
        repeats: How often each sample comes in an epoch; not together with `weight`.
        min_frames, max_frames: Samples with fewer or more pixel frames are left out; null is no limit.
        min_side: Samples whose shorter side has fewer pixels are left out.
        max_pixels: Samples of a larger height * width are left out; null is no limit.
        prefix_frames: A longer clip serves its first frames as samples of these lengths too, also one that is longer
            than `max_frames`; the lengths themselves lie within `min_frames` and `max_frames`.
        captions: Probability of each caption by name, for samples that have several; "caption" is the first one.
            Relative to the captions that a sample has; empty takes the first one always.
    """

    path: str = ""
    weight: float | None = None
    repeats: int = 1
    min_frames: int = 1
    max_frames: int | None = None
    min_side: int = 0
    max_pixels: int | None = None
    prefix_frames: list[int] = field(default_factory=list)
    captions: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the source and the key."""
        name = f"data.sources (path {self.path!r})"
        if not self.path:
            raise ValueError("data.sources: an entry has no path")
        if self.weight is not None and (not self.weight > 0 or self.repeats != 1):
            raise ValueError(
                f"{name}: weight={self.weight} must be positive, and repeats ({self.repeats}) stay 1 beside it"
            )
        if self.repeats < 1:
            raise ValueError(f"{name}: repeats={self.repeats} must be at least 1; leave the source out instead of 0")
        if any(not weight >= 0 for weight in self.captions.values()) or (
            self.captions and not sum(self.captions.values()) > 0
        ):
            raise ValueError(f"{name}: captions={self.captions} must be probabilities, not all 0")
        self._check_limits(name)

    def _check_limits(self, name: str) -> None:
        for key, least in (("min_frames", 1), ("max_frames", 1), ("min_side", 0), ("max_pixels", 1)):
            limit = getattr(self, key)
            if limit is not None and limit < least:
                none = " (leave it out for no limit)" if key.startswith("max") else ""
                raise ValueError(f"{name}: {key}={limit} must be at least {least}{none}")
        longest = _or_inf(self.max_frames)
        if longest < self.min_frames:
            raise ValueError(f"{name}: max_frames={longest} is below min_frames={self.min_frames}")
        geometry = LatentGeometry()
        for frames in self.prefix_frames:
            if frames < 1 or (frames - 1) % geometry.temporal_stride:
                raise ValueError(f"{name}: prefix_frames={frames} is not {geometry.temporal_stride}k+1")
            if frames < self.min_frames:
                raise ValueError(f"{name}: prefix_frames={frames} is below min_frames={self.min_frames}")
            if frames > longest:
                raise ValueError(f"{name}: prefix_frames={frames} is above max_frames={longest}")


@dataclass(frozen=True, eq=False)
class Corpus:
    """All samples that a run may draw; row numbers are the sample ids of the scheduler.

    Attributes:
        sources: The datasets' settings.
        indices: Their indices.
        datasets: int16 [n], which dataset a sample is of.
        rows: int64 [n], its row there.
        repeats: int64 [n], how often it comes in an epoch.
        table: The samples as the scheduler sees them.
        left_out: What limits of the sources have excluded, a line each.
    """

    sources: tuple[SourceConfig, ...]
    indices: tuple[ShardIndex, ...]
    datasets: np.ndarray
    rows: np.ndarray
    repeats: np.ndarray
    table: SampleTable
    left_out: tuple[str, ...]

    @property
    def info(self) -> DatasetInfo:
        """What all samples share; names of captions are those of the first dataset."""
        return self.indices[0].info

    @property
    def fingerprint(self) -> str:
        """Hex digest of all samples and of how they are mixed; a resumed run compares it. Paths do not count."""
        digest = hashlib.blake2b(digest_size=16)
        for source, index in zip(self.sources, self.indices, strict=True):
            settings = {key: value for key, value in asdict(source).items() if key != "path"}
            digest.update(json.dumps([index.fingerprint, settings], sort_keys=True).encode())
        return digest.hexdigest()

    @property
    def source_names(self) -> list[str]:
        """Distinct media files of origin that `source_codes` points to."""
        return self._sources.names

    @property
    def source_codes(self) -> np.ndarray:
        """int32 [n], index into `source_names`."""
        return self._sources.codes

    @property
    def _sources(self) -> StringColumn:
        assert isinstance(self.table.sources, StringColumn)
        return self.table.sources

    def place(self, i: int) -> SamplePlace:
        """What reading sample `i` takes."""
        dataset = int(self.datasets[i])
        place = self.indices[dataset].place(int(self.rows[i]))
        return replace(place, frames=self.table.shapes[self.table.shape_ids[i]].frames, dataset=dataset)

    def reader(self) -> "CorpusReader":
        """Reads the samples by their places."""
        return CorpusReader(
            [SampleReader(index) for index in self.indices], [dict(source.captions) for source in self.sources]
        )

    def verify(self) -> None:
        """Check all datasets, see `ShardIndex.verify`."""
        for index in self.indices:
            index.verify()

    def describe(self) -> str:
        """What is mixed, a line for each dataset and each exclusion."""
        lines = []
        for number, source in enumerate(self.sources):
            draws = int(self.repeats[self.datasets == number].sum())
            lines.append(
                f"data: {source.path}: {int((self.datasets == number).sum())} samples, {draws} draws an epoch "
                f"({draws / self.repeats.sum():.1%})"
            )
        return "\n".join([*lines, *(f"data: {line}" for line in self.left_out)])


def open_corpus(sources: Sequence[SourceConfig], geometry: LatentGeometry) -> Corpus:
    """Read the indices of `sources` and mix them.

    Raises:
        ValueError: If an index cannot be read, the datasets do not fit together (codec, normalisation, text encoder),
            a limit leaves nothing of a source, or only some sources have weights.
    """
    assert sources
    for source in sources:
        source.check()
    if len({source.weight is None for source in sources}) > 1:
        raise ValueError("data.sources: give every source a weight, or none")
    indices = tuple(ShardIndex.read(source.path) for source in sources)
    for source, index in zip(sources, indices, strict=True):
        for name in _SHARED:
            mine, first = getattr(index.info, name), getattr(indices[0].info, name)
            if mine != first:
                raise ValueError(f"{source.path}: {name} {mine!r}, but {sources[0].path} has {first!r}")
        if unknown := source.captions.keys() - {FIRST_CAPTION, *index.info.captions}:
            raise ValueError(
                f"{source.path}: no caption is named {sorted(unknown)} (data.sources.captions); "
                f"there are {[FIRST_CAPTION, *index.info.captions]}"
            )
    parts, left_out = [], []
    for source, index in zip(sources, indices, strict=True):
        rows, frames, lines = _served(source, index)
        parts.append((rows, frames))
        left_out += lines
    repeats = _repeats(sources, [len(rows) for rows, _ in parts])
    table = SampleTable.from_columns(
        *(
            StringColumn.concatenate(
                [_rows(getattr(index, name), rows) for index, (rows, _) in zip(indices, parts, strict=True)]
            )
            for name in ("keys", "sources")
        ),
        np.concatenate([frames for _, frames in parts]),
        *(
            np.concatenate([getattr(index, name)[rows] for index, (rows, _) in zip(indices, parts, strict=True)])
            for name in ("heights", "widths", "text_lens")
        ),
        geometry,
    )
    datasets = np.repeat(np.arange(len(parts), dtype=np.int16), [len(rows) for rows, _ in parts])
    rows = np.concatenate([rows for rows, _ in parts])
    return Corpus(tuple(sources), indices, datasets, rows, repeats, table, tuple(left_out))


def _served(source: SourceConfig, index: ShardIndex) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Rows of the index that are served, the frames of each, and what is left out."""
    frames, side = index.frames, np.minimum(index.heights, index.widths)
    pixels = index.heights.astype(np.int64) * index.widths
    too_small, too_large = side < source.min_side, pixels > _or_inf(source.max_pixels)
    limits = {
        f"fewer than {source.min_frames} frames (min_frames)": frames < source.min_frames,
        f"more than {source.max_frames} frames (max_frames)": frames > _or_inf(source.max_frames),
        f"a side below {source.min_side} pixels (min_side)": too_small,
        f"more than {source.max_pixels} pixels (max_pixels)": too_large,
    }
    left_out = [f"{source.path}: {mask.sum()} samples left out: {why}" for why, mask in limits.items() if mask.any()]
    kept = np.flatnonzero(~np.logical_or.reduce(list(limits.values())))
    rows, served = [kept], [frames[kept]]
    for prefix in sorted(set(source.prefix_frames)):
        # A clip that is too long to be served whole may still serve its beginning.
        longer = np.flatnonzero((frames > prefix) & ~too_small & ~too_large)
        rows.append(longer)
        served.append(np.full(len(longer), prefix, frames.dtype))
    order = np.argsort(np.concatenate(rows), kind="stable")  # neighbours in a shard stay neighbours in the table
    if not len(order):
        raise ValueError(f"{source.path}: no sample is left: {'; '.join(left_out) or 'the index is empty'}")
    return np.concatenate(rows)[order], np.concatenate(served)[order], left_out


def _or_inf(limit: int | None) -> float:
    return math.inf if limit is None else limit


def _rows(column: StringColumn, rows: np.ndarray) -> StringColumn:
    return column if len(rows) == len(column) and (np.diff(rows) == 1).all() else column.take(rows)


def _repeats(sources: Sequence[SourceConfig], counts: Sequence[int]) -> np.ndarray:
    """int64 [n], repeats of all samples, dataset after dataset."""
    if sources[0].weight is None:
        return np.repeat([source.repeats for source in sources], counts)
    rates = np.array([source.weight for source in sources], float) / counts
    parts = []
    for number, (rate, count) in enumerate(zip(rates / rates.min(), counts, strict=True)):
        once_more = round((rate - int(rate)) * count)
        repeats = np.full(count, int(rate), np.int64)
        repeats[np.argsort(np.random.Philox(key=number).random_raw(count), kind="stable")[:once_more]] += 1
        parts.append(repeats)
    return np.concatenate(parts)


class CorpusReader:
    """Reads samples of several datasets by their places. Picklable and small."""

    def __init__(self, readers: list[SampleReader], captions: list[dict[str, float]]) -> None:
        self._readers = readers
        self._captions = captions

    def read(self, place: SamplePlace) -> Sample:
        """The sample at `place`. Raises SampleError as `SampleReader.read`."""
        return self._readers[place.dataset].read(place)

    def null_text(self) -> torch.Tensor:
        """Embedding of the empty caption, as stored. Raises ValueError if it cannot be read."""
        return self._readers[0].null_text()

    def choose_caption(self, place: SamplePlace, sample: Sample, uniform: float) -> str:
        """Name of the caption that a draw takes; `uniform` is its random number in [0, 1)."""
        weights = {name: self._captions[place.dataset].get(name, 0.0) for name in sorted(sample.stored_texts)}
        total = sum(weights.values())
        if not total:
            return FIRST_CAPTION
        for name, weight in weights.items():
            uniform -= weight / total
            if uniform < 0 and weight:
                return name
        return max(name for name, weight in weights.items() if weight)  # rounding left nothing
