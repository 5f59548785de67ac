"""Bytes of a dataset wherever it lies: local disk, NFS, or any URL that fsspec knows (`s3://`, `gs://`, `http://`).

Readings that fail for a moment are tried again, with growing waits; what is missing or forbidden fails at once.
"""

import errno
import logging
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

logger = logging.getLogger(__name__)

TRIES = 6
FIRST_WAIT_S = 0.2  # doubles each time, up to a half more at random: 6 to 9 s in all before a reading is given up
_MAX_OPEN_FILES = 64  # per process, far below the usual limit of 1024 open files
# What NFS and overloaded disks answer for a while; everything else on a local path will not heal.
_PASSING = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.ENETRESET}
)

T = TypeVar("T")


def is_url(path: str | Path) -> bool:
    """Whether `path` is for fsspec: it names a protocol."""
    return "://" in str(path)


class Storage:
    """Files of one folder, local or remote, by name. Picklable; opens nothing before it is asked to.

    Args:
        root: Folder, or URL of one.
        options: Arguments of the fsspec file system, such as `{"endpoint_url": ...}`; for URLs only.
    """

    def __init__(self, root: str | Path, options: dict[str, Any] | None = None) -> None:
        self.root = str(root).rstrip("/") if is_url(root) else str(root)
        self.is_remote = is_url(root)
        self._options = options or {}
        self._files: OrderedDict[str, int] = OrderedDict()
        self._remote: tuple[int, Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["root"], state["options"])  # type: ignore[misc]

    def path(self, name: str) -> str:
        """Where `name` lies, for messages and for opening it by other means."""
        return f"{self.root}/{name}" if self.is_remote else str(Path(self.root) / name)

    def exists(self, name: str) -> bool:
        """Whether there is a file `name`. Raises OSError if that cannot be found out."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """Bytes of a file. Raises OSError (FileNotFoundError if it is missing)."""
        if self.is_remote:
            return int(self._retry(name, lambda fs, base: fs.info(f"{base}/{name}")["size"]))
        return _retry_local(name, lambda: os.stat(self.path(name)).st_size)

    def names(self, suffix: str) -> list[str]:
        """Names of the files right in the folder that end in `suffix`, sorted. Raises OSError."""
        if self.is_remote:
            found = self._retry("", lambda fs, base: fs.ls(base, detail=False))
            return sorted(Path(name).name for name in found if name.endswith(suffix))
        return sorted(path.name for path in Path(self.root).glob(f"*{suffix}"))

    def read(self, name: str) -> bytes:
        """A whole file. Raises OSError."""
        if self.is_remote:
            return bytes(self._retry(name, lambda fs, base: fs.cat_file(f"{base}/{name}")))
        return _retry_local(name, Path(self.path(name)).read_bytes)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`.

        Raises:
            OSError: If they cannot be read, after retries where these can help.
            ValueError: If the file ends before.
        """
        if self.is_remote:

            def fetch(fs: Any, base: str) -> bytes:
                data = bytes(fs.cat_file(f"{base}/{name}", start=offset, end=offset + size))
                if len(data) != size and fs.info(f"{base}/{name}")["size"] >= offset + size:
                    raise OSError(f"the answer held {len(data)} of {size} bytes")
                return data

            data = self._retry(name, fetch)
        else:
            data = _retry_local(name, lambda: self._pread(name, offset, size))
        if len(data) != size:
            raise ValueError(f"{len(data)} of {size} bytes at {offset}: the shard is shorter than its index says")
        return data

    def open(self, name: str) -> BinaryIO:
        """A file to be read from its beginning. Raises OSError."""
        if self.is_remote:
            return self._retry(name, lambda fs, base: fs.open(f"{base}/{name}", "rb", block_size=2**22))
        return open(self.path(name), "rb")

    def _pread(self, name: str, offset: int, size: int) -> bytes:
        # pread has no file position, so forked workers may share the descriptor.
        descriptor = self._files.pop(name, None)
        if descriptor is None:
            descriptor = os.open(self.path(name), os.O_RDONLY)
        try:
            parts = [os.pread(descriptor, size, offset)]
            while len(parts[-1]) > 0 and (read := sum(map(len, parts))) < size:
                parts.append(os.pread(descriptor, size - read, offset + read))
        except OSError:
            os.close(descriptor)  # a stale handle of NFS never heals; the next try opens the file anew
            raise
        self._files[name] = descriptor
        if len(self._files) > _MAX_OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _retry(self, name: str, operation: Callable[[Any, str], T]) -> T:
        def attempt() -> T:
            fs, base = self._file_system()
            return operation(fs, base)

        def can_pass(error: Exception) -> bool:
            status = getattr(error, "status", None)  # of an HTTP answer
            return not isinstance(error, (FileNotFoundError, PermissionError)) and not (status and 400 <= status < 429)

        return _with_retries(self.path(name), attempt, can_pass)

    def _file_system(self) -> tuple[Any, str]:
        # fsspec's connections must not cross a fork: one file system a process.
        if self._remote is None or self._remote[0] != os.getpid():
            from fsspec.core import url_to_fs

            fs, base = url_to_fs(self.root, skip_instance_cache=True, use_listings_cache=False, **self._options)
            self._remote = (os.getpid(), fs, base.rstrip("/"))
        return self._remote[1:]


def _retry_local(name: str, operation: Callable[[], T]) -> T:
    return _with_retries(name, operation, lambda error: isinstance(error, OSError) and error.errno in _PASSING)


def _with_retries(what: str, operation: Callable[[], T], can_pass: Callable[[Exception], bool]) -> T:
    for number in range(1, TRIES + 1):
        try:
            return operation()
        except Exception as error:  # remote file systems raise classes of their own
            if not can_pass(error):
                raise
            if number == TRIES:
                raise OSError(f"{what}: {error!r}, {TRIES} times") from error
            wait_s = FIRST_WAIT_S * 2 ** (number - 1) * random.uniform(1, 1.5)
            logger.warning("%s: %r; try %d of %d in %.1f s", what, error, number + 1, TRIES, wait_s)
            time.sleep(wait_s)
    raise AssertionError("unreachable")
