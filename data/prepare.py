"""Raw media to a dataset: decode, cut, encode, write, report. The dataset appears whole or not at all.

The work is done in units (`raw.py`), dealt to the processes of a launch by number. Everything is written into a hidden
folder beside the output, which becomes the output at the end. A unit counts once its marker is there, so a launch that
was stopped goes on where it was, with any number of processes; settings and inputs must be the same, and the media of
finished units must not have changed.
"""

import json
import logging
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adaptiveload.data.cuts import CutConfig
from adaptiveload.data.encode import EncodeConfig, ItemResult, encode_items
from adaptiveload.data.index import INFO_NAME, DatasetInfo, ShardIndex, write_index
from adaptiveload.data.latent_codecs import LatentCodec
from adaptiveload.data.media import MediaError
from adaptiveload.data.raw import RawItem, Unit, digest_of, plan_units
from adaptiveload.data.report import Report
from adaptiveload.data.shard_writer import DatasetWriter, write_null_text
from adaptiveload.data.strings import StringColumn
from adaptiveload.data.text import TextEncoder
from adaptiveload.scheduling.shapes import Shape

logger = logging.getLogger(__name__)

REPORT_NAME = "report.json"
ITEMS_NAME = "items.jsonl"
_UNITS = ".units"
_PLAN_NAME = "plan.json"
_PROGRESS_S = 20.0  # between lines of progress
_COMPLETING = "completing"
_POLL_S = 0.2  # between looks at what other processes have finished


@dataclass(frozen=True)
class PrepareConfig:
    """How a preparation runs; what it makes is `CutConfig`'s part.

    Attributes:
        encode: Threads and batches.
        samples_per_shard: Samples in one shard.
        items_per_unit: Files or rows that are done as a whole; a shard of media is always one unit.
        media_root: What relative paths of manifests are relative to; their folder if None.
        overwrite: Replace an existing dataset, once the new one is complete.
    """

    encode: EncodeConfig = field(default_factory=EncodeConfig)
    samples_per_shard: int = 1000
    items_per_unit: int = 256
    media_root: str | None = None
    overwrite: bool = False


def prepare(
    inputs: Sequence[str | Path],
    output: Path,
    cuts: CutConfig,
    codec: LatentCodec,
    text_encoder: TextEncoder,
    config: PrepareConfig | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    all_have_begun: Callable[[], None] | None = lambda: None,
    before_it_appears: Callable[[Path, dict[str, Any]], None] = lambda folder, report: None,
) -> tuple[ShardIndex, dict[str, Any]] | None:
    """Prepare this process's share of the inputs into the dataset folder `output`.

    Args:
        inputs: See `plan_units`.
        output: Folder to make. It appears under this name only once it is complete.
        cuts: Target shapes and rules.
        codec: Pixels to latents.
        text_encoder: Captions to embeddings.
        config: Threads, batches, shards.
        rank: This process among the `world_size` that share the work.
        world_size: Processes that share the work.
        all_have_begun: Of the processes of one launch: returns once every process has called it, else rank 0, which
            waits for the others and completes the dataset, could be done before another looks. None: the processes
            need not run at the same time, and the one that finds all units finished completes it.
        before_it_appears: Called once with the whole dataset's folder, before it has its name, and its report: what it
            writes there is part of the dataset.

    Returns:
        Where the dataset was completed, its index and the content of its `report.json`; None elsewhere.

    Raises:
        ValueError: If `output` exists and may not be replaced, or is not a dataset; if an input is unusable as such; if
            an unfinished preparation has other settings or its media have changed; if no input gives a sample.
    """
    config = config or PrepareConfig()
    assert cuts.geometry == codec.geometry
    output = output.absolute()
    units = plan_units(inputs, config.items_per_unit, config.media_root)
    if rank >= len(units) and all_have_begun is None:
        return None  # there is nothing to do, and the others may have completed the dataset by now
    _check_output(output, config.overwrite)
    work = _Work(output.with_name(f".{output.name}.unfinished"), units, cuts, codec, text_encoder, config)
    work.begin(rank, world_size)
    if all_have_begun is not None:
        all_have_begun()
    mine = [number for number in range(rank, len(units), world_size) if not work.is_done(number)]
    progress = _Progress([units[number] for number in mine], is_told=rank == 0)
    for number in mine:
        work.do(number, progress)
    if all_have_begun is None:
        if not work.may_complete():
            return None
    elif rank:
        return None
    else:
        work.wait()
    try:
        summary = work.finish(before_it_appears)
    except ValueError:
        shutil.rmtree(work.folder)
        raise
    replaced = output.with_name(f".{output.name}.replaced")
    if output.exists():
        output.rename(replaced)
    work.folder.rename(output)
    shutil.rmtree(replaced, ignore_errors=True)
    return ShardIndex.read(output), summary


def sample_key(name: str) -> str:
    """Key of an item: readable, free of dots and slashes, and unique through eight hex digits of its hash."""
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower())[-40:].strip('-')}-{digest_of(name)[:8]}"


class _Work:
    """The hidden folder: shards, and for each finished unit a report and an index."""

    def __init__(
        self,
        folder: Path,
        units: list[Unit],
        cuts: CutConfig,
        codec: LatentCodec,
        text_encoder: TextEncoder,
        config: PrepareConfig,
    ) -> None:
        self.folder, self.units = folder, units
        self.cuts, self.codec, self.text_encoder, self.config = cuts, codec, text_encoder, config

    def begin(self, rank: int, world_size: int) -> None:
        """Make the folder, or check that the one that is there is of the same work."""
        settings = {
            "codec": f"{self.codec.name} {self.codec.settings} {self.codec.normalization_hash}",
            "text encoder": self.text_encoder.name,
            "cuts": json.loads(json.dumps(asdict(self.cuts))),
            "samples per shard": self.config.samples_per_shard,
            "inputs": [[unit.name, unit.digest] for unit in self.units],
        }
        path = self.folder / _PLAN_NAME
        if not path.exists():  # whoever comes first; the others would write the same
            (self.folder / _UNITS).mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".tmp{rank}")
            temporary.write_text(json.dumps(settings))
            temporary.replace(path)
        before = json.loads(path.read_text())
        changed = [key for key, value in settings.items() if before.get(key) != value]
        if changed:
            raise ValueError(
                f"{self.folder} holds an unfinished preparation with other {', '.join(changed)}; delete that folder to "
                "begin anew, or go on with the old settings"
            )
        for number in range(rank, len(self.units), world_size):
            if self.is_done(number):
                self._check_sources(number)

    def is_done(self, number: int) -> bool:
        """Whether a unit is finished, by whatever process."""
        return self._marker(number).exists()

    def do(self, number: int, progress: "_Progress") -> None:
        """Prepare one unit."""
        prefix = f"shard-{number:06d}"
        for path in self.folder.glob(f"{prefix}-*.tar"):
            path.unlink()  # of a try that was stopped
        shutil.rmtree(self.folder / _UNITS / f"{number:06d}.index", ignore_errors=True)
        report = Report()
        writer = DatasetWriter(self.folder, self.codec, self.text_encoder, self.config.samples_per_shard, prefix)
        try:
            items = _only_items(self.units[number], report)
            for result in encode_items(items, self.cuts, self.codec, self.config.encode):
                report.add(result)
                _write(writer, result, self.cuts.fps)
                progress.add_item(len(result.samples))
        finally:
            writer.close()
        if report.num_samples:
            folder = self.folder / _UNITS / f"{number:06d}.index"
            folder.mkdir()
            index = writer.index()
            write_index(ShardIndex(str(folder), *_columns(index)))
        marker = self._marker(number)
        temporary = marker.with_suffix(".tmp")
        temporary.write_text(json.dumps(report.state(), ensure_ascii=False), encoding="utf-8")
        temporary.replace(marker)
        progress.end_unit()

    def wait(self) -> None:
        """Return once all units are finished, by whatever process."""
        told = time.monotonic()
        while missing := [n for n in range(len(self.units)) if not self.is_done(n)]:
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                logger.warning("waiting for %d units of other processes, the first is %d", len(missing), missing[0])
            time.sleep(_POLL_S)

    def may_complete(self) -> bool:
        """Whether all units are finished and no other process completes the dataset; of several, one is told so."""
        if not all(map(self.is_done, range(len(self.units)))):
            return False
        try:
            (self.folder / _UNITS / _COMPLETING).mkdir()
        except FileNotFoundError:  # it is complete
            return False
        except FileExistsError:
            logger.warning("another part completes the dataset; if that was stopped, start once more without parts")
            return False
        return True

    def finish(self, before_it_appears: Callable[[Path, dict[str, Any]], None]) -> dict[str, Any]:
        """Index, null embedding and report of the whole dataset. Raises ValueError if there is no sample."""
        report, indices = Report(), []
        with (self.folder / ITEMS_NAME).open("w", encoding="utf-8") as items:
            for number in range(len(self.units)):
                state = json.loads(self._marker(number).read_text(encoding="utf-8"))
                for line in state["items"]:
                    items.write(json.dumps(line, ensure_ascii=False) + "\n")
                report.merge(state)
                folder = self.folder / _UNITS / f"{number:06d}.index"
                if folder.exists():
                    indices.append(ShardIndex.read(folder))
        if not indices:
            reasons = "".join(
                f"\n  {problem.key}: {problem.reason}" for problem in [*report.damaged, *report.skipped][:5]
            )
            raise ValueError(f"no input gave a sample ({report.num_skipped} skipped){reasons}")
        write_null_text(self.folder, self.text_encoder)
        index = _merged(indices, str(self.folder))
        index.verify()
        write_index(index)
        summary = report.to_json()
        text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        (self.folder / REPORT_NAME).write_text(text, encoding="utf-8")
        before_it_appears(self.folder, summary)
        shutil.rmtree(self.folder / _UNITS)  # from here on a kill would cost all units
        (self.folder / _PLAN_NAME).unlink()
        return summary

    def _marker(self, number: int) -> Path:
        return self.folder / _UNITS / f"{number:06d}.json"

    def _check_sources(self, number: int) -> None:
        """Raise ValueError if media of a finished unit have changed: its latents would be of what is no more."""
        hashes = {
            line["item"]: line["source_hash"]
            for line in json.loads(self._marker(number).read_text(encoding="utf-8"))["items"]
            if line.get("source_hash")
        }
        for entry in self.units[number].read():
            if isinstance(entry, RawItem) and entry.name in hashes:
                try:
                    found = entry.content_hash()
                except MediaError as error:
                    found = str(error)
                if found != hashes[entry.name]:
                    raise ValueError(
                        f"{entry.name} has changed since it was prepared into {self.folder} (content {found}, then "
                        f"{hashes[entry.name]}); delete {self._marker(number)} to prepare its unit again"
                    )


def _only_items(unit: Unit, report: Report) -> Iterator[RawItem]:
    """The items of a unit; its problems go to the report."""
    for entry in unit.read():
        if isinstance(entry, RawItem):
            yield entry
        elif entry.key == unit.name:
            report.damaged.append(entry)
        else:
            report.skip(entry)


def _write(writer: DatasetWriter, result: ItemResult, fps: float) -> None:
    numbers: Counter[Shape] = Counter()
    item = result.item
    for sample in sorted(result.samples, key=lambda sample: (sample.cut.shape, sample.cut.start)):
        shape = sample.cut.shape
        key = f"{sample_key(item.name)}-{shape}-{numbers[shape]:03d}"
        numbers[shape] += 1
        box = [round(edge, 2) for edge in sample.cut.box]
        meta = {**shape._asdict(), "fps": fps, "start_frame": sample.cut.start, "box": box}
        meta["source_hash"] = result.source_hash
        if item.start_s or item.end_s is not None:
            meta |= {"start_s": item.start_s, "end_s": item.end_s}
        if item.fields:
            meta["fields"] = item.fields
        writer.write(key, item.source, sample.latents, item.caption, meta, item.captions)


def _columns(index: ShardIndex) -> list[Any]:
    names = ("info", "keys", "sources", "shards", "offsets", "sizes", "frames", "heights", "widths", "text_lens")
    return [getattr(index, name) for name in names]


def _merged(indices: list[ShardIndex], root: str) -> ShardIndex:
    infos = [index.info for index in indices]
    captions = tuple(sorted({name for info in infos for name in info.captions}))
    shards = {name: size for info in infos for name, size in info.shards.items()}
    first = asdict(infos[0]) | {"num_samples": sum(info.num_samples for info in infos), "shards": shards}
    info = DatasetInfo(**{**first, "captions": captions, "geometry": infos[0].geometry})
    columns = [
        StringColumn.concatenate(list(parts)) if isinstance(parts[0], StringColumn) else np.concatenate(parts)
        for parts in zip(*(_columns(index)[1:] for index in indices), strict=True)
    ]
    return ShardIndex(root, info, *columns)


class _Progress:
    """Says now and then how far this process is, how fast, and how long it will take.

    Args:
        units: What this process has to do.
        is_told: Whether it speaks; one process of a launch does.
    """

    def __init__(self, units: list[Unit], is_told: bool) -> None:
        self._units, self._is_told = units, is_told
        self._begun = self._told = time.monotonic()
        self._num_units = self._num_items = self._num_samples = self._items_of_unit = 0

    def add_item(self, num_samples: int) -> None:
        """An item of the present unit is done."""
        self._num_items += 1
        self._items_of_unit += 1
        self._num_samples += num_samples
        if self._is_told and time.monotonic() - self._told > _PROGRESS_S:
            self._told = time.monotonic()
            print(self.describe(self._told - self._begun), flush=True)

    def end_unit(self) -> None:
        """The present unit is done."""
        self._num_units += 1
        self._items_of_unit = 0

    def describe(self, seconds: float) -> str:
        """One line about what was done in so many seconds."""
        of_unit = self._units[self._num_units].num_items
        done = self._num_units + (min(self._items_of_unit / of_unit, 1) if of_unit else 0)
        left_s = seconds * (len(self._units) - done) / done if done else None
        left = "time left not known yet" if left_s is None else f"about {_duration(left_s)} left"
        return (
            f"unit {self._num_units + 1} of {len(self._units)}, {self._num_items} items: "
            f"{self._num_items / seconds:.1f} items/s, {self._num_samples / seconds:.1f} samples/s a process, {left}"
        )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"output {output} exists; pass --overwrite to replace it, or name another folder")
    if not output.is_dir() or (any(output.iterdir()) and not (output / INFO_NAME).is_file()):
        raise ValueError(f"output {output} is not a dataset (no {INFO_NAME}); it is not overwritten")
