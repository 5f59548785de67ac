"""Finding what to prepare: folders of media and WebDataset shards of media, each item with its caption.

In a folder, files that differ only in their last extension belong together (`a/dog.mp4` and `a/dog.txt`); in a shard,
members of one key. The caption is a `.txt` in UTF-8 (with or without a byte order mark), or the text `caption` of a
`.json`. An item without both media and caption is skipped, with the reason.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from adaptiveload.data.media import PICTURE_SUFFIXES, VIDEO_SUFFIXES
from adaptiveload.data.tar_scan import Problem, scan_tar

_MEDIA_SUFFIXES = PICTURE_SUFFIXES | VIDEO_SUFFIXES


@dataclass(frozen=True)
class RawItem:
    """One picture or clip.

    Attributes:
        source: Name that tells it from all others: input folder or shard, then the path in it.
        path: The file, or the shard that holds it.
        byte_range: Offset and length in the shard; None for a file.
        is_video: Whether it is a clip.
        caption: Its text.
    """

    source: str
    path: Path
    byte_range: tuple[int, int] | None
    is_video: bool
    caption: str

    def open(self) -> Path | BinaryIO:
        """The media, for `read_picture` and `iter_frames`."""
        if self.byte_range is None:
            return self.path
        return io.BytesIO(_read(self.path, self.byte_range))


@dataclass(frozen=True)
class RawInputs:
    """Everything under the inputs: usable items and skipped ones (one entry each); damage of whole shards apart."""

    items: list[RawItem]
    skipped: list[Problem]
    damaged: list[Problem]


def find_inputs(inputs: list[Path]) -> RawInputs:
    """All items under folders (searched to the bottom, shards in them included) and `.tar` shards, in a fixed order.

    Raises:
        ValueError: If an input is neither, or two items would have the same name.
    """
    found = RawInputs([], [], [])
    for root in inputs:
        if root.is_dir():
            _find_in_folder(root, found)
        elif root.suffix == ".tar" and root.is_file():
            _find_in_shard(root, root.name, found)
        else:
            raise ValueError(f"input {root} is neither a folder nor a .tar shard")
    names = [item.source for item in found.items]
    twins = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twins:
        raise ValueError(f"two inputs have the same name: {', '.join(sorted(twins)[:3])}; rename a folder or shard")
    return found


def _find_in_folder(root: Path, found: RawInputs) -> None:
    groups: dict[Path, list[Path]] = {}
    for path in _visible_files(root):
        groups.setdefault(path.with_suffix(""), []).append(path)
    for stem, paths in sorted(groups.items()):
        for path in (path for path in paths if path.suffix == ".tar"):
            _find_in_shard(path, f"{root.name}/{path.relative_to(root)}", found)
        parts = {path.suffix.lower(): (path, None) for path in paths if path.suffix != ".tar"}
        if parts:
            _add(f"{root.name}/{stem.relative_to(root)}", parts, found)


def _visible_files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts):
            yield path


def _find_in_shard(path: Path, name: str, found: RawInputs) -> None:
    scan = scan_tar(path)
    for problem in scan.problems:
        # A problem of one sample is a skipped item; one of the whole shard hides an unknown number of them.
        (found.damaged if problem.key == path.name else found.skipped).append(problem)
    for sample in scan.samples:
        parts = {f".{extension}": (path, place) for extension, place in sample.members.items()}
        _add(f"{name}/{sample.key}", parts, found)


def _add(name: str, parts: dict[str, tuple[Path, tuple[int, int] | None]], found: RawInputs) -> None:
    media = sorted(parts.keys() & _MEDIA_SUFFIXES)
    try:
        if len(media) != 1:
            raise ValueError(f"{len(media)} media files ({', '.join(media)})" if media else "no media")
        path, byte_range = parts[media[0]]
        caption = _caption({kind: _read(*parts[kind]) for kind in (".txt", ".json") if kind in parts})
        item = RawItem(name + media[0], path, byte_range, media[0] in VIDEO_SUFFIXES, caption)
    except ValueError as error:
        found.skipped.append(Problem(name, str(error)))
    else:
        found.items.append(item)


def _read(path: Path, byte_range: tuple[int, int] | None) -> bytes:
    if byte_range is None:
        return path.read_bytes()
    with path.open("rb") as file:
        file.seek(byte_range[0])
        return file.read(byte_range[1])


def _caption(parts: dict[str, bytes]) -> str:
    """Caption from the .txt, else from the .json. Raises ValueError with the reason if there is none to be trusted."""
    if not parts:
        raise ValueError("no caption")
    text = _decode(parts[".txt"]) if ".txt" in parts else _json_caption(_decode(parts[".json"]))
    if "\ufffd" in text or "\0" in text:
        raise ValueError("the caption holds characters that a wrong decoding leaves behind (U+FFFD or NUL)")
    text = " ".join(text.replace("\ufeff", "").split())
    if not text:
        raise ValueError("the caption is empty")
    return text


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the caption is not UTF-8: {error.reason} at byte {error.start}") from error


def _json_caption(text: str) -> str:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the json is broken: {error}") from error
    if not isinstance(value, dict) or "caption" not in value:
        raise ValueError("the json has no field `caption`")
    if not isinstance(value["caption"], str):
        raise ValueError(f"`caption` in the json is {json.dumps(value['caption'])[:40]}, not a text")
    return value["caption"]
