"""What a WebDataset shard holds, read once from front to back, and whether it is whole.

Python's tarfile (and webdataset on top of it) ends without a word at a cut or damaged header; here every early end is a
`Problem`. Members of one sample follow each other and share the name up to the first dot of the file name.
"""

import io
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from adaptiveload.data.storage import Storage, is_url

_BLOCK = tarfile.BLOCKSIZE
_LOOK_BACK = 64 * 1024  # tarfile goes back by a header or so


@dataclass(frozen=True)
class Problem:
    """Something that was left out: `key` is a file, a shard, or shard/sample."""

    key: str
    reason: str


@dataclass(frozen=True)
class TarSample:
    """Place of one sample in its shard.

    Attributes:
        key: Common name of the members.
        offset: First byte of the first member's header.
        size: Bytes up to the end of the last member, padding included.
        members: For each extension, such as "json": offset and length of the data.
        data: For each extension what `load` kept of it.
    """

    key: str
    offset: int
    size: int
    members: dict[str, tuple[int, int]]
    data: dict[str, bytes] = field(default_factory=dict)


Load = Callable[[str, BinaryIO], bytes]


def load_all(extension: str, member: BinaryIO) -> bytes:
    """Keep every member whole."""
    return member.read()


def iter_tar(file: BinaryIO, shard: str, load: Load) -> Iterator[TarSample | Problem]:
    """Samples of one shard in order, and problems as they are met. Memory does not grow with the shard.

    Keys that come twice are kept once (the first) and reported; so is an early end of the file.

    Args:
        file: The shard; need not be seekable.
        shard: Its name in problems.
        load: Called with the extension and the data of every member; says what to keep of it.
    """
    file = file if file.seekable() else _Forward(file)
    seen: set[str] = set()
    named: set[str] = set()
    current: TarSample | None = None
    end, count, damage = 0, 0, None
    try:
        # "r:" refuses compressed shards: they cannot be read by byte range.
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()
                if not member.isfile() or member.name.startswith("__"):
                    end = _padded(member.offset_data + member.size)
                    continue
                key, extension = split_name(member.name)
                if current is not None and (key != current.key or extension in current.members):
                    yield current
                    count, current = count + 1, None
                if current is None and key in seen:
                    if key not in named:
                        reason = "the key comes more than once in the shard; only the first sample is used"
                        yield Problem(f"{shard}/{key}", reason)
                    named.add(key)
                    end = _padded(member.offset_data + member.size)
                    continue
                seen.add(key)
                current = current or TarSample(key, member.offset, 0, {})
                end = _padded(member.offset_data + member.size)
                data = load(extension, tar.extractfile(member))
                current = TarSample(
                    key,
                    current.offset,
                    end - current.offset,
                    {**current.members, extension: (member.offset_data, member.size)},
                    {**current.data, extension: data},
                )
            damage = _early_end(file, tar.offset)
            if damage is None and isinstance(file, _Forward):
                _length(file)  # a command says only at its end that it failed
    except (tarfile.TarError, OSError, EOFError) as error:
        damage = f"not a whole tar file: {error}"
    if damage is not None and current is not None and _length(file) < end:
        yield Problem(f"{shard}/{current.key}", "cut in the middle of a member")
    elif current is not None:
        yield current
        count += 1
    if damage is not None:
        yield Problem(shard, f"{damage}; {count} whole samples before it")


def open_shard(url: str) -> BinaryIO:
    """A shard to be read from front to back: a path, a URL for fsspec, or `pipe:COMMAND`, whose output it is.

    Raises:
        OSError: If it cannot be opened; later, from reading, if a command fails.
    """
    if url.startswith("pipe:"):
        return _Pipe(url.removeprefix("pipe:"))
    if is_url(url):
        folder, _, name = url.rpartition("/")
        return Storage(folder).open(name)
    return open(url, "rb")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def split_name(name: str) -> tuple[str, str]:
    """WebDataset's (key, extension): the name is split at the first dot of its last path component."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _early_end(file: BinaryIO, offset: int) -> str | None:
    """Why the shard does not end properly at `offset`, where the reader stopped; None if it does."""
    file.seek(offset)
    block = file.read(_BLOCK)
    if len(block) < _BLOCK:
        return f"cut at byte {offset + len(block)}, where a header or the end mark is missing"
    if any(block):
        return f"damaged header at byte {offset}"
    return None


def _length(file: BinaryIO) -> int:
    return file.seek(0, io.SEEK_END)


class _Pipe(io.RawIOBase):
    """Output of a shell command; reading to its end raises OSError if the command fails."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE)
        self._has_ended = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if ((not data and size) or size < 0) and not self._has_ended:
            self._has_ended = True
            if status := self._process.wait():
                raise OSError(f"the command ended with status {status}")
        return data

    def close(self) -> None:
        if not self.closed:
            assert self._process.stdout is not None
            self._process.stdout.close()  # a command that still writes ends by that
            self._process.wait()
        super().close()


class _Forward(io.RawIOBase):
    """A stream that can be asked for its position, moved forward, and a little back."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._recent = b""  # the last bytes read from the stream
        self._end = 0  # position of the stream
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            while self._fetch(2**20):
                pass
            self._position = self._end + offset
        else:
            self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        while self._position > self._end and self._fetch(min(self._position - self._end, 2**20)):
            pass
        if self._position < self._end - len(self._recent):
            raise OSError(f"a stream cannot go back to byte {offset} from {self._end}")
        return self._position

    def read(self, size: int = -1) -> bytes:
        back = self._end - self._position
        if back < 0:  # beyond the end of the stream
            return b""
        kept = self._recent[len(self._recent) - back :] if back else b""
        if 0 <= size <= back:
            self._position += size
            return kept[:size]
        parts = [kept]
        wanted = size - back if size >= 0 else -1
        while wanted and (data := self._fetch(min(wanted, 2**24) if wanted > 0 else 2**24)):
            parts.append(data)
            wanted -= len(data) if wanted > 0 else 0
        self._position = self._end
        return b"".join(parts)

    def _fetch(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._end += len(data)
        self._recent = (self._recent + data)[-_LOOK_BACK:] if len(data) < _LOOK_BACK else data[-_LOOK_BACK:]
        return data
