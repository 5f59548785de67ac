"""The folders of checkpoints on disk: written with checksums, committed by a rename, checked before they are read."""

import contextlib
import io
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

LATEST_NAME, STATE_NAME, SUMS_NAME = "latest", "state.json", "checksums.json"
_READ_BYTES = 2**24

FileSums = dict[str, tuple[int, int]]
"""Size in bytes and CRC-32 of each file, by name."""


class SummedWriter(FileSystemWriter):
    """Writes a rank's shards, one file, and keeps the sums of what it was given to write.

    Attributes:
        sums: Of the files written so far.
    """

    def __init__(self, folder: Path) -> None:
        # Its fsync leaves out what is still in Python's buffer. Nothing is copied ahead: all is in host memory already.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.sums: FileSums = {}
        self.fs = _SummedFileSystem(self.sums)


class _SummedFileSystem(FileSystem):
    def __init__(self, sums: FileSums) -> None:
        self.sums = sums

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        raw = _SummedFile(path, mode)
        with io.BufferedWriter(raw) as stream:
            yield stream
        _sync(Path(path))
        # The metadata is renamed once it is whole.
        self.sums[Path(path).name.removesuffix(".tmp")] = (raw.size, raw.crc)


class _SummedFile(io.FileIO):
    size, crc = 0, 0

    def write(self, content: Any) -> int:
        written = super().write(content)
        self.size += written
        self.crc = zlib.crc32(memoryview(content).cast("B")[:written], self.crc)
        return written


def commit(partial: Path, target: Path, state: str, sums: FileSums) -> None:
    """Make `partial`, whose shards are written, the checkpoint `target`; a crash leaves the earlier ones whole.

    Args:
        partial: Folder of the shards.
        target: Beside it.
        state: JSON of what is kept beside the tensors.
        sums: Of the files in `partial`.

    Raises:
        OSError: If a file is not there as it was written, or the disk does not take what is added.
    """
    for name, (size, _) in sums.items():
        path = partial / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            raise OSError(
                f"{path} {'is not there' if found is None else f'has {found} bytes'}, a rank has written {size}: all "
                "nodes must share output_dir"
            )
    content = state.encode()
    _write(partial / STATE_NAME, content)
    _write(partial / SUMS_NAME, json.dumps(sums | {STATE_NAME: (len(content), zlib.crc32(content))}).encode())
    _sync(partial)
    for other in committed(target.parent):
        # The run went on before these, because they were damaged. They must not pass for the newest again.
        if other.name >= target.name:
            shutil.rmtree(other.with_suffix(".damaged"), ignore_errors=True)
            other.rename(other.with_suffix(".damaged"))
    partial.rename(target)
    _sync(target.parent)
    pointer = target.parent / f".{LATEST_NAME}.tmp"
    _write(pointer, f"{target.name}\n".encode())
    pointer.replace(target.parent / LATEST_NAME)


def committed(folder: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix == "" and path.is_dir())


def latest(folder: Path) -> Path | None:
    """The newest committed checkpoint in `folder`. The file `latest` names it too, for others: it may be torn."""
    return next(reversed(committed(folder)), None)


def step_of(path: Path) -> int:
    """Completed steps of the checkpoint in the folder `path`."""
    return int(path.name.removeprefix("step-"))


def remove(path: Path) -> None:
    """Remove a checkpoint; a crash meanwhile leaves nothing that looks like one."""
    torso = path.with_suffix(".partial")
    try:
        if path != torso:
            path.rename(torso)
        shutil.rmtree(torso)
    except OSError as error:  # NFS keeps files that somebody reads; the next save tries again
        print(f"{path} is not removed: {error}", flush=True)


def read_state(path: Path, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The dict saved beside a checkpoint's tensors.

    Args:
        path: A committed checkpoint.
        expected: Keys of the dict whose values must be these.

    Raises:
        ValueError: If `path` is no whole checkpoint, or was made under other values than `expected`.
    """
    try:
        state: dict[str, Any] = json.loads((path / STATE_NAME).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a whole checkpoint: {error}") from error
    for key, value in (expected or {}).items():
        if state.get(key) != value:
            raise ValueError(
                f"{path}: made with {key}={state.get(key)!r}, this run has {value!r}; what goes on from a checkpoint "
                "must keep it, or start anew under another `name`"
            )
    return state


def find_damage(path: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with each file of a checkpoint; of its files only every `parts`-th, from `part`, is read."""
    try:
        sums: FileSums = json.loads((path / SUMS_NAME).read_text())
        names = sorted(sums)[part::parts]
        problems = [_find_file_damage(path / name, *sums[name]) for name in names]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return [f"{SUMS_NAME} cannot be read ({error})"]
    return [problem for problem in problems if problem is not None]


def _find_file_damage(path: Path, size: int, crc: int) -> str | None:
    try:
        if (found := path.stat().st_size) != size:
            return f"{path.name} has {found} bytes, {size} were written"
        actual = 0
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                actual = zlib.crc32(chunk, actual)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    if actual != crc:
        return f"{path.name} has changed since it was written (CRC-32 {actual:08x}, not {crc:08x})"
    return None


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def _sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
