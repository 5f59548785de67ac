"""Finding what to prepare, in units of work: folders of media, WebDataset shards of media, and manifests.

In a folder, files that differ only in their last extension belong together (`a/dog.mp4` and `a/dog.txt`); in a shard,
members of one key; in a manifest (`manifest.py`) a row names media file and caption. The caption is a `.txt` in UTF-8
(with or without a byte order mark), or the text `caption` of a `.json`. An item without both media and caption is
skipped, with the reason.
"""

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

from adaptiveload.data.captions import captions_and_fields
from adaptiveload.data.media import PICTURE_SUFFIXES, VIDEO_SUFFIXES, MediaError
from adaptiveload.data.storage import Storage, is_url
from adaptiveload.data.tar_scan import Problem, iter_tar, load_all, open_shard

MEDIA_SUFFIXES = PICTURE_SUFFIXES | VIDEO_SUFFIXES


@dataclass(frozen=True)
class RawItem:
    """One picture, clip, or part of a clip.

    Attributes:
        name: What tells it from all others: input folder, shard or media path, and the part of it.
        source: The media file; parts of one file share it.
        path: Path or URL of the file, or of the shard that holds it.
        is_video: Whether it is a clip.
        caption: Its text.
        captions: Further captions by name.
        fields: Numbers and texts to keep, such as quality scores.
        start_s, end_s: Part of the clip in seconds; `end_s` None is its end.
        data: The media where they lie in a shard.
    """

    name: str
    source: str
    path: str
    is_video: bool
    caption: str
    captions: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    start_s: float = 0.0
    end_s: float | None = None
    data: bytes | None = field(default=None, repr=False)

    def open(self) -> Path | BinaryIO:
        """The media, for `read_picture` and `iter_frames`. Raises MediaError if they cannot be read."""
        if self.data is not None:
            return io.BytesIO(self.data)
        if not is_url(self.path):
            return Path(self.path)
        try:
            return io.BytesIO(self._remote)
        except OSError as error:
            raise MediaError(f"cannot be read: {error}") from error

    @cached_property
    def _remote(self) -> bytes:
        folder, _, name = self.path.rpartition("/")
        return Storage(folder).read(name)

    def content_hash(self) -> str:
        """Hex digest of the media file. Raises MediaError if it cannot be read."""
        media = self.open()
        try:
            with media.open("rb") if isinstance(media, Path) else media as file:
                return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as error:
            raise MediaError(f"cannot be read: {error}") from error


@dataclass(frozen=True)
class Unit:
    """Work that is done and written as a whole: a shard, or some files or rows.

    Attributes:
        name: For messages.
        digest: Changes if other items belong to it.
        read: Its items and what is wrong with others, in order.
        num_items: How many, if that is known before reading.
    """

    name: str
    digest: str
    read: Callable[[], Iterator[RawItem | Problem]]
    num_items: int | None = None


@dataclass(frozen=True)
class RawInputs:
    """Everything under the inputs: usable items and skipped ones (one entry each); damage of whole shards apart."""

    items: list[RawItem]
    skipped: list[Problem]
    damaged: list[Problem]


def find_inputs(inputs: Sequence[str | Path]) -> RawInputs:
    """All items of all units at once, media of shards in memory. Raises ValueError as `plan_units`."""
    found = RawInputs([], [], [])
    for unit in plan_units(inputs):
        for entry in unit.read():
            if isinstance(entry, RawItem):
                found.items.append(entry)
            else:
                # A problem of one sample is a skipped item; one of the whole shard hides an unknown number of them.
                (found.damaged if entry.key == unit.name else found.skipped).append(entry)
    return found


def plan_units(inputs: Sequence[str | Path], items_per_unit: int = 256, media_root: str | None = None) -> list[Unit]:
    """Units of all inputs, in a fixed order, the same on every machine that sees the same files.

    Args:
        inputs: Folders (searched to the bottom, shards in them included; `NAME=FOLDER` names what is in it so, and not
            after the folder); `.tar` shards as paths, URLs or `pipe:COMMAND`, braces expanded; manifests (`.csv`,
            `.jsonl`, `.parquet`).
        items_per_unit: Most files or rows of one unit; a shard is always one.
        media_root: What relative paths of manifests are relative to; their folder if None.

    Raises:
        ValueError: If an input is nothing of this, a manifest cannot be used, or two items would have the same name.
    """
    from braceexpand import braceexpand

    from adaptiveload.data.manifest import MANIFEST_SUFFIXES, manifest_units

    units: list[Unit] = []
    folders: set[str] = set()
    for given in inputs:
        for text in braceexpand(str(given)) if "{" in str(given) else [str(given)]:
            is_remote = text.startswith("pipe:") or is_url(text)
            if is_url(text) and Path(text).suffix in MANIFEST_SUFFIXES:
                raise ValueError(f"manifest {text} must be a local file (its media may be URLs); download it first")
            if is_remote:
                units.append(_shard_unit(text, text))
            elif (folder := _named_folder(text)) is not None:
                name, root = folder
                if name in folders:
                    raise ValueError(f"two input folders have the same name {name!r}; call one OTHER={root}")
                folders.add(name)
                units += _folder_units(name, root, items_per_unit)
            elif Path(text).suffix == ".tar" and Path(text).is_file():
                units.append(_shard_unit(text, Path(text).name))
            elif Path(text).suffix in MANIFEST_SUFFIXES and Path(text).is_file():
                units += manifest_units(Path(text), items_per_unit, media_root)
            else:
                raise ValueError(f"input {text} is neither a folder, a .tar shard nor a manifest ({MANIFEST_SUFFIXES})")
    names = [unit.name for unit in units]
    twins = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twins:
        raise ValueError(f"two inputs have the same name: {', '.join(sorted(twins)[:3])}; rename one")
    return units


def digest_of(*parts: object) -> str:
    """Short hex digest of the texts of `parts`."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def _named_folder(text: str) -> tuple[str, Path] | None:
    """Name and path of an input folder; None for another kind of input."""
    if Path(text).is_dir():
        return os.path.basename(os.path.abspath(text)), Path(text)
    name, separator, path = text.partition("=")
    if separator and name and "/" not in name and Path(path).is_dir():
        return name, Path(path)
    return None


def _folder_units(root_name: str, root: Path, items_per_unit: int) -> list[Unit]:
    groups: dict[Path, list[Path]] = {}
    shards = []
    for path in _visible_files(root):
        if path.suffix == ".tar":
            shards.append(path)
        else:
            groups.setdefault(path.with_suffix(""), []).append(path)
    stems = sorted(groups)
    units = []
    for first in range(0, len(stems), items_per_unit):
        part = stems[first : first + items_per_unit]
        chosen = [(f"{root_name}/{stem.relative_to(root)}", groups[stem]) for stem in part]
        names = [name for name, _ in chosen]
        unit_name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        units.append(Unit(unit_name, digest_of(*names), partial(_read_files, chosen), len(chosen)))
    return units + [_shard_unit(str(path), f"{root_name}/{path.relative_to(root)}") for path in sorted(shards)]


def _visible_files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts):
            yield path


def _read_files(groups: list[tuple[str, list[Path]]]) -> Iterator[RawItem | Problem]:
    for name, paths in groups:
        by_suffix = {path.suffix.lower(): path for path in sorted(paths)}
        media = sorted(by_suffix.keys() & MEDIA_SUFFIXES)
        try:
            suffix = _only(media)
            texts = {kind: by_suffix[kind].read_bytes() for kind in (".txt", ".json") if kind in by_suffix}
            yield _item(name, suffix, str(by_suffix[suffix]), texts, None)
        except (ValueError, OSError) as error:
            yield Problem(name, str(error))


def _shard_unit(url: str, name: str) -> Unit:
    return Unit(name, digest_of(name), partial(_read_shard, url, name))


def _read_shard(url: str, name: str) -> Iterator[RawItem | Problem]:
    try:
        file = open_shard(url)
    except OSError as error:
        yield Problem(name, f"cannot be opened: {error}")
        return
    with file:
        for sample in iter_tar(file, name, load_all):
            if isinstance(sample, Problem):
                yield sample
                continue
            try:
                parts = {f".{extension}": data for extension, data in sample.data.items()}
                suffix = _only(sorted(parts.keys() & MEDIA_SUFFIXES))
                texts = {kind: parts[kind] for kind in (".txt", ".json") if kind in parts}
                yield _item(f"{name}/{sample.key}", suffix, url, texts, parts[suffix])
            except ValueError as error:
                yield Problem(f"{name}/{sample.key}", str(error))


def _only(media: list[str]) -> str:
    if len(media) != 1:
        raise ValueError(f"{len(media)} media files ({', '.join(media)})" if media else "no media")
    return media[0]


def _item(name: str, suffix: str, path: str, texts: dict[str, bytes], data: bytes | None) -> RawItem:
    caption, captions, fields = captions_and_fields(texts)
    full = name + suffix
    return RawItem(full, full, path, suffix in VIDEO_SUFFIXES, caption, captions, fields, data=data)
