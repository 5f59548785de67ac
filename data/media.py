"""Pictures and clips as upright RGB: whatever the file's mode, rotation or frame rate.

Clips are resampled by time stamp: frame k at `fps` is the last picture shown at or before k/fps seconds after the first
one. Headers are not trusted: a clip has the frames that can be decoded, up to its last picture.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import av
import numpy as np
from PIL import Image, ImageOps

PICTURE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})

# A picture that stays longer than this means broken time stamps (or nothing to learn), not slow motion.
_MAX_HOLD_S = 10
# A part that begins later than this is sought; an earlier one is decoded from the clip's beginning.
_SEEK_FROM_S = 2


class MediaError(Exception):
    """A file, or the rest of it, that cannot be decoded; the text says why."""


@dataclass(frozen=True)
class VideoInfo:
    """A clip as it decodes.

    Attributes:
        num_frames: Frames at the asked rate.
        height, width: Upright size in square pixels.
        damage: Why decoding stopped early; None if the clip is whole.
    """

    num_frames: int
    height: int
    width: int
    damage: str | None


def read_picture(source: Path | BinaryIO) -> np.ndarray:
    """Upright picture as uint8 [H, W, 3]; transparent parts become white, 16-bit grey is scaled to 8 bits.

    Raises:
        MediaError: If the file is not a whole picture of a known kind.
    """
    try:
        with Image.open(source) as image:
            return np.asarray(_to_rgb(ImageOps.exif_transpose(image)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise MediaError(f"not a readable picture: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey; convert("RGB") would clip it to white
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise ValueError(f"grey values {values.min()}..{values.max()} exceed 16 bits")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


@dataclass(frozen=True)
class _Turn:
    """One of the eight ways to show a stored picture: axes swapped, then mirrored left to right, top to bottom.

    PyAV tells the rotation of a frame, but neither that it is mirrored nor does it apply any.
    """

    swaps_axes: bool = False
    mirrors_columns: bool = False
    mirrors_rows: bool = False

    @classmethod
    def of(cls, frame: av.VideoFrame) -> "_Turn":
        """What the display matrix says: a stored (x, y) is shown at (a x + c y, b x + d y). Nearest right angle."""
        data = frame.side_data.get("DISPLAYMATRIX")
        if data is None:
            return cls()
        a, b, _, c, d = (int(value) for value in np.frombuffer(data, "=i4")[:5])
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return cls(False, a < 0, d < 0)
        return cls(True, c < 0, b < 0)

    def apply(self, rgb: np.ndarray) -> np.ndarray:
        """The picture [H, W, 3] as shown."""
        shown = rgb.swapaxes(0, 1) if self.swaps_axes else rgb
        return shown[:: -1 if self.mirrors_rows else 1, :: -1 if self.mirrors_columns else 1]


@dataclass(frozen=True)
class Picture:
    """One decoded picture of a clip, still in the decoder's pixel format."""

    frame: av.VideoFrame
    pixel_aspect: Fraction

    @property
    def size(self) -> tuple[int, int]:
        """Height and width as shown, in square pixels."""
        height, width = self.frame.height, self._square_width
        return (width, height) if self._turn.swaps_axes else (height, width)

    def rgb(self) -> np.ndarray:
        """uint8 [H, W, 3] as a player shows it: turned and mirrored by the display matrix, pixels made square.

        Transparent parts become white. Range and matrix of the colours are the frame's own.
        """
        stored = self.frame.format
        has_alpha = stored.has_palette or any(component.is_alpha for component in stored.components)
        rgb = self.frame.to_ndarray(
            format="rgba" if has_alpha else "rgb24", width=self._square_width, height=self.frame.height
        )
        return self._turn.apply(np.asarray(_to_rgb(Image.fromarray(rgb))) if has_alpha else rgb)

    @property
    def _turn(self) -> "_Turn":
        return _Turn.of(self.frame)

    @property
    def _square_width(self) -> int:
        return max(1, round(self.frame.width * self.pixel_aspect))


def probe_video(source: Path | BinaryIO, fps: float, start_s: float = 0.0, end_s: float | None = None) -> VideoInfo:
    """Decode a clip, or a part of it, once to learn its frames and size; memory does not grow with its length.

    Raises:
        MediaError: If not a single picture can be decoded.
    """
    num_frames, size, damage = 0, (0, 0), None
    try:
        for _, picture in iter_frames(source, fps, start_s, end_s):
            size = size if num_frames else picture.size
            num_frames += 1
    except MediaError as error:
        if not num_frames:
            raise
        damage = str(error)
    if not num_frames:
        raise MediaError(f"no picture between {start_s:.3f} s and {'the end' if end_s is None else f'{end_s:.3f} s'}")
    return VideoInfo(num_frames, *size, damage)


def iter_frames(
    source: Path | BinaryIO, fps: float, start_s: float = 0.0, end_s: float | None = None
) -> Iterator[tuple[int, Picture]]:
    """(k, picture shown at start_s + k/fps seconds) for k = 0, 1, ... up to the last picture, or before `end_s`.

    A start far into a clip is reached by its index, not by decoding what comes before.

    Raises:
        MediaError: After the last good frame, if decoding could not go on to the end.
    """
    begin = Fraction(start_s).limit_denominator(1_000_000)
    length = None if end_s is None else Fraction(end_s).limit_denominator(1_000_000) - begin
    for k, picture in _resampled(_pictures(source, begin), fps, begin):
        if length is not None and k >= length * Fraction(fps).limit_denominator(100_000):
            return
        yield k, picture


def _resampled(
    pictures: Iterator[tuple[Fraction, Picture]], fps: float, begin: Fraction
) -> Iterator[tuple[int, Picture]]:
    period = 1 / Fraction(fps).limit_denominator(100_000)
    k, held, shown_from, damage = 0, None, Fraction(0), None
    while True:
        try:
            seconds, picture = next(pictures)
        except StopIteration:
            break
        except MediaError as error:
            damage = error
            break
        seconds -= begin
        # Stamps are rounded to the container's time base: up to half a unit late still counts as in time.
        seconds -= picture.frame.time_base / 2
        while held is not None and k * period < seconds:
            yield k, held
            k += 1
        held, shown_from = picture, seconds
    while held is not None and k * period <= shown_from + held.frame.time_base:
        yield k, held
        k += 1
    if damage is not None:
        raise damage


def _pictures(source: Path | BinaryIO, begin: Fraction) -> Iterator[tuple[Fraction, Picture]]:
    """Decoded pictures with their time after the clip's first one, in seconds, strictly increasing.

    Those long before `begin` may be left out.
    """
    count, start = 0, None
    if not isinstance(source, Path):
        source.seek(0)
    try:
        with av.open(source, metadata_errors="replace") as container:
            stream = container.streams.best("video")
            if stream is None:
                raise MediaError("no video stream")
            aspect = stream.sample_aspect_ratio or Fraction(1)
            for now, frame in _in_time(container.decode(stream)):
                if start is None:
                    start = now
                    if begin > _SEEK_FROM_S:
                        yield from _pictures_from(container, stream, start, begin, aspect)
                        return
                yield now - start, Picture(frame, aspect)
                count += 1
    except (av.FFmpegError, OSError) as error:
        raise MediaError(f"decoding stopped after {count} pictures: {type(error).__name__}: {error}") from error
    if not count:
        raise MediaError("no pictures in the video stream")


def _pictures_from(
    container: av.container.InputContainer, stream: av.VideoStream, start: Fraction, begin: Fraction, aspect: Fraction
) -> Iterator[tuple[Fraction, Picture]]:
    """As `_pictures`, from the key picture at or before `begin` on."""
    container.seek(int((start + begin) / stream.time_base), stream=stream, backward=True)
    now = None
    for now, frame in _in_time(container.decode(stream), f" after {float(begin):.3f} s"):
        yield now - start, Picture(frame, aspect)
    if now is None:
        raise MediaError(f"the clip ends before {float(begin):.3f} s")


def _in_time(frames: Iterator[av.VideoFrame], where: str = "") -> Iterator[tuple[Fraction, av.VideoFrame]]:
    """Frames with their time stamps in seconds, strictly increasing. Raises MediaError at damage or a broken stamp."""
    previous = None
    for number, frame in enumerate(frames):
        if frame.pts is None or frame.is_corrupt:
            raise MediaError(f"picture {number}{where} is damaged or has no time stamp")
        now = frame.pts * frame.time_base
        if previous is not None and now - previous > _MAX_HOLD_S:
            raise MediaError(f"picture {number}{where} comes {float(now - previous):.1f} s after the one before")
        if previous is None or now > previous:
            yield now, frame
            previous = now


def crop_resize(rgb: np.ndarray, box: tuple[float, float, float, float], height: int, width: int) -> np.ndarray:
    """Part `box` = (left, top, right, bottom) of uint8 [H, W, 3], filtered to uint8 [height, width, 3]."""
    image = Image.fromarray(np.ascontiguousarray(rgb))
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC, box=box))
