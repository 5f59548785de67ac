"""Tiny real media and shards for the tests. Frame i of a clip is grey of level 20 + 6 i: it survives lossy coding."""

import io
import struct
import tarfile
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from adaptiveload.data.tar_scan import Problem, TarSample, iter_tar, load_all


def grey(i, height=48, width=64):
    return np.full((height, width, 3), 20 + 6 * i, np.uint8)


def level(rgb):
    """Index of a frame made by `grey`."""
    return round((float(np.median(rgb)) - 20) / 6)


def write_clip(path, frames, fps=16, pts_ms=None, **options):
    """mp4 of RGB frames at `fps`, or shown at `pts_ms` milliseconds."""
    frames = list(frames)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "4", "g": "10", "bf": "0", **options}
        if pts_ms is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i, rgb in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
            frame.pts = i if pts_ms is None else pts_ms[i]
            if pts_ms is not None:
                frame.time_base = Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return Path(path)


def find_box(data, path, start=0, end=None):
    """(offset, size) of an mp4 box such as "moov/trak/tkhd"."""
    name, _, rest = path.partition("/")
    end = len(data) if end is None else end
    while start + 8 <= end:
        size, kind = struct.unpack(">I4s", data[start : start + 8])
        if kind.decode("latin1") == name:
            return find_box(data, rest, start + 8, start + size) if rest else (start, size)
        start += size
    raise KeyError(path)


def picture_bytes(i=0, height=48, width=64, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(grey(i, height, width)).save(buffer, kind)
    return buffer.getvalue()


def write_tar(path, members):
    """Tar of (name, bytes) in the given order, names may repeat."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return Path(path)


@dataclass(frozen=True)
class TarScan:
    """All whole samples of one shard, in order, and what is wrong with the rest."""

    samples: list[TarSample] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def scan_tar(path):
    """Scan one local shard from front to back."""
    scan = TarScan()
    with path.open("rb") as file:
        for found in iter_tar(file, path.name, load_all):
            (scan.problems if isinstance(found, Problem) else scan.samples).append(found)
    return scan


# What a player does with a stored picture: as display matrix (a, b, c, d) of x' = a x + c y, y' = b x + d y, as EXIF
# orientation, and as a function.
TURNS = {
    "upright": ((1, 0, 0, 1), 1, lambda rgb: rgb),
    "mirrored": ((-1, 0, 0, 1), 2, lambda rgb: rgb[:, ::-1]),
    "turned 180": ((-1, 0, 0, -1), 3, lambda rgb: rgb[::-1, ::-1]),
    "upside down": ((1, 0, 0, -1), 4, lambda rgb: rgb[::-1]),
    "transposed": ((0, 1, 1, 0), 5, lambda rgb: rgb.swapaxes(0, 1)),
    "turned right": ((0, 1, -1, 0), 6, lambda rgb: rgb.swapaxes(0, 1)[:, ::-1]),
    "transposed, turned 180": ((0, -1, -1, 0), 7, lambda rgb: rgb[::-1, ::-1].swapaxes(0, 1)),
    "turned left": ((0, -1, 1, 0), 8, lambda rgb: rgb.swapaxes(0, 1)[::-1]),
}


def set_display_matrix(path, matrix, height, width):
    """Write `matrix` = (a, b, c, d) of `TURNS` into the track header of an mp4 of height x width."""
    a, b, c, d = matrix
    x, y = width * (a < 0) + height * (c < 0), width * (b < 0) + height * (d < 0)
    data = bytearray(path.read_bytes())
    offset = find_box(data, "moov/trak/tkhd")[0] + 48
    data[offset : offset + 36] = struct.pack(">9i", *(n << 16 for n in (a, b, 0, c, d, 0, x, y)), 1 << 30)
    path.write_bytes(data)
    return path
