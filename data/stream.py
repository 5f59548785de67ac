"""Latent shards read from front to back, without an index: which samples a rank gets, and how far it has come.

In each epoch the shards are dealt to the ranks in seeded order; where there are fewer shards than ranks, every rank
reads all shards and takes every R-th sample. So every sample is read once an epoch by one rank. Progress is kept by
shard and place in it, whichever rank read it: a run goes on with any number of ranks.
"""

import hashlib
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors

from adaptiveload.data.index import DatasetInfo
from adaptiveload.data.indexer import tensor_shapes
from adaptiveload.data.reader import JSON_MEMBER, LATENTS_MEMBER, Sample, parse_sample
from adaptiveload.data.storage import Storage, is_url
from adaptiveload.data.tar_scan import Problem, TarSample, iter_tar, load_all, open_shard
from adaptiveload.scheduling.shapes import LatentGeometry, Shape


@dataclass(frozen=True)
class StreamPlace:
    """Where a sample was met: the `ordinal`-th whole sample of `shard`."""

    shard: str
    ordinal: int


@dataclass(frozen=True)
class StreamLoss:
    """A sample that cannot be used; `place` is None for what is not a whole sample."""

    key: str
    reason: str
    place: StreamPlace | None


@dataclass(frozen=True)
class ShardEnd:
    """All of a shard has been read; it holds `total` whole samples."""

    shard: str
    total: int


@dataclass
class Progress:
    """What has been trained or lost in the current epoch.

    Attributes:
        epoch: Of the stream, from 0.
        done: For each shard begun the ordinals that are done.
        totals: Samples of the shards that were read to their end.
    """

    epoch: int = 0
    done: dict[str, set[int]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)

    def mark(self, place: StreamPlace) -> None:
        """The sample at `place` is done."""
        self.done.setdefault(place.shard, set()).add(place.ordinal)

    def is_finished(self, shard: str) -> bool:
        """Whether nothing is left of a shard."""
        return shard in self.totals and len(self.done.get(shard, ())) >= self.totals[shard]

    def to_json(self) -> dict[str, Any]:
        """Short and readable: ordinals as ranges [first, last + 1]."""
        shards = sorted({*self.done, *self.totals})
        return {
            "epoch": self.epoch,
            "shards": {
                shard: {"done": _ranges(self.done.get(shard, set())), "of": self.totals.get(shard)} for shard in shards
            },
        }

    @classmethod
    def merged(cls, parts: Sequence[dict[str, Any]]) -> "Progress":
        """Of what several ranks wrote with `to_json`, or one checkpoint."""
        progress = cls(parts[0]["epoch"])
        for part in parts:
            assert part["epoch"] == progress.epoch
            for shard, state in part["shards"].items():
                for first, end in state["done"]:
                    progress.done.setdefault(shard, set()).update(range(first, end))
                if state["of"] is not None:
                    progress.totals[shard] = state["of"]
        return progress


def _ranges(numbers: set[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number, number + 1])
    return ranges


def find_shards(path: str) -> tuple[list[str], Storage]:
    """Shards of a folder or URL, or of a path with braces; and the folder of the null embedding.

    Raises:
        ValueError: If there are none.
    """
    if path.endswith(".tar"):
        from braceexpand import braceexpand

        urls = list(braceexpand(path))
        storage = Storage(urls[0].rpartition("/")[0] or ".")
        missing = [url for url in urls if not is_url(url) and not Storage(".").exists(url)]
        if missing:
            raise ValueError(f"data.path: {len(missing)} shards are missing, the first is {missing[0]}")
    else:
        storage = Storage(path)
        urls = [storage.path(name) for name in storage.names(".tar")]
    if not urls:
        raise ValueError(f"no shards (*.tar) in data.path={path}")
    return urls, storage


def shard_names(path: str) -> str:
    """Digest of the names of all shards: progress is kept by name, so a resumed run must have the same."""
    names = [url.rpartition("/")[2] for url in find_shards(path)[0]]
    if len(set(names)) < len(names):
        raise ValueError(f"data.path={path}: two shards have the same file name; progress is kept by it")
    return f"{len(names)} shards, {hashlib.blake2b(json.dumps(names).encode(), digest_size=8).hexdigest()}"


def deal_shards(urls: Sequence[str], seed: int, epoch: int, rank: int, ranks: int) -> tuple[list[str], int, int]:
    """This rank's shards of an epoch, in order, and which samples of them: those with ordinal % count == first."""
    key = hashlib.blake2b(f"stream\0{seed}\0{epoch}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(len(urls))
    shuffled = [urls[i] for i in np.argsort(raw, kind="stable")]
    if len(urls) < ranks:
        return shuffled, rank, ranks
    return shuffled[rank::ranks], 0, 1


def peek_normalization(urls: Sequence[str]) -> str:
    """Normalisation of the first sample that says its own. Raises ValueError if none does."""
    for url in urls:
        try:
            with open_shard(url) as file:
                for found in iter_tar(file, url, load_all):
                    if isinstance(found, TarSample) and JSON_MEMBER in found.data:
                        try:
                            return str(json.loads(found.data[JSON_MEMBER])["normalization_hash"])
                        except (ValueError, KeyError, TypeError):
                            continue
        except OSError:
            continue  # read_stream will report it
    raise ValueError(f"no sample in {len(urls)} shards says its normalisation, the first shard is {urls[0]}")


def read_stream(
    urls: Sequence[str],
    first: int,
    count: int,
    progress: Progress,
    text_dim: int,
    expected_hash: str,
    geometry: LatentGeometry,
) -> Iterator[tuple[StreamPlace, Shape, Sample] | StreamLoss | ShardEnd]:
    """Samples of shards in order, without those that `progress` has done.

    Args:
        urls: Paths or URLs of shards.
        first: With `count`, only samples with ordinal % count == first.
        count: Ranks that read these shards.
        progress: Done in an earlier try.
        text_dim: Length of one text embedding.
        expected_hash: Normalisation of the latents.
        geometry: Of the latents.
    """
    for url in urls:
        name = url.rpartition("/")[2]
        if progress.is_finished(name):
            continue
        done = progress.done.get(name, set())
        total = 0
        try:
            with open_shard(url) as file:
                for found in iter_tar(file, name, load_all):
                    if isinstance(found, Problem):
                        if first == 0:  # of several ranks that read the shard, one reports
                            yield StreamLoss(found.key, found.reason, None)
                        continue
                    place = StreamPlace(name, total)
                    total += 1
                    if place.ordinal % count != first or place.ordinal in done:
                        continue
                    try:
                        meta, lengths = _meta(found.data)
                        shape = Shape(meta["frames"], meta["height"], meta["width"])
                        info = DatasetInfo(
                            meta["codec"], expected_hash, meta["text_encoder"], text_dim, 0, {}, geometry=geometry
                        )
                        geometry.check(shape)
                        yield place, shape, parse_sample(found.key, found.data, info, shape, lengths)
                    except KeyError as error:
                        yield StreamLoss(f"{name}/{found.key}", f"{error.args[0]} is missing", place)
                    except (ValueError, TypeError, safetensors.SafetensorError) as error:
                        yield StreamLoss(f"{name}/{found.key}", str(error), place)
        except (OSError, tarfile.TarError) as error:
            yield StreamLoss(name, f"cannot be read on: {error}", None)
        yield ShardEnd(name, total)


def _meta(members: dict[str, bytes]) -> tuple[dict[str, Any], int]:
    """The JSON member, and rows of the longest text."""
    meta = json.loads(members[JSON_MEMBER])
    _, texts = tensor_shapes(members[LATENTS_MEMBER], len(members[LATENTS_MEMBER]))
    return meta, max(shape[0] for shape in texts.values())
