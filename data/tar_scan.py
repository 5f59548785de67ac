"""What a WebDataset shard holds, by its tar headers alone, and whether it is whole.

Python's tarfile (and webdataset on top of it) ends without a word at a cut or damaged header; here every early end is a
`Problem`. Members of one sample follow each other and share the name up to the first dot of the file name.
"""

import tarfile
from dataclasses import dataclass
from pathlib import Path

_BLOCK = tarfile.BLOCKSIZE


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
    """

    key: str
    offset: int
    size: int
    members: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class TarScan:
    """All whole samples of one shard, in order, and what is wrong with the rest."""

    samples: list[TarSample]
    problems: list[Problem]


def scan_tar(path: Path) -> TarScan:
    """Scan one shard. Keys that come twice are kept once (the first) and reported; so is an early end of the file."""
    groups: list[TarSample] = []
    end, damage = 0, None
    try:
        # "r:" refuses compressed shards: they cannot be read by byte range.
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                end = _padded(member.offset_data + member.size)
                if member.isfile() and not member.name.startswith("__"):
                    _add(groups, member)
            damage = _early_end(path, tar.offset)
    except (tarfile.TarError, OSError) as error:
        damage = f"not a whole tar file: {error}"
    samples, problems = _drop_twins(groups, path.name)
    if damage is not None:
        if path.stat().st_size < end and samples:  # the last member is cut inside its data
            lost = samples.pop()
            problems.append(Problem(f"{path.name}/{lost.key}", "cut in the middle of a member"))
        problems.append(Problem(path.name, f"{damage}; {len(samples)} whole samples before it"))
    return TarScan(samples, problems)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def split_name(name: str) -> tuple[str, str]:
    """WebDataset's (key, extension): the name is split at the first dot of its last path component."""
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension.lower()


def _add(groups: list[TarSample], member: tarfile.TarInfo) -> None:
    key, extension = split_name(member.name)
    place = member.offset_data, member.size
    end = _padded(member.offset_data + member.size)
    last = groups[-1] if groups else None
    if last is not None and last.key == key and extension not in last.members:
        groups[-1] = TarSample(key, last.offset, end - last.offset, {**last.members, extension: place})
    else:
        groups.append(TarSample(key, member.offset, end - member.offset, {extension: place}))


def _drop_twins(groups: list[TarSample], shard: str) -> tuple[list[TarSample], list[Problem]]:
    first: dict[str, TarSample] = {}
    twins: dict[str, Problem] = {}
    for group in groups:
        if group.key in first:
            reason = "the key comes more than once in the shard; only the first sample is used"
            twins[group.key] = Problem(f"{shard}/{group.key}", reason)
        first.setdefault(group.key, group)
    return list(first.values()), list(twins.values())


def _early_end(path: Path, offset: int) -> str | None:
    """Why the shard does not end properly at `offset`, where the reader stopped; None if it does."""
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read(_BLOCK)
    if len(block) < _BLOCK:
        return f"cut at byte {offset + len(block)}, where a header or the end mark is missing"
    if any(block):
        return f"damaged header at byte {offset}"
    return None
