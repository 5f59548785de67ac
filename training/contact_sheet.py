"""Strips of frames under each other: for each sample its clip, the codec's reconstruction, what the model made."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_SCALE, _GAP, _LABEL_WIDTH, _TEXT_HEIGHT = 1.5, 6, 70, 24
# Frames of a strip, and the longer side of one in pixels.
_MAX_FRAMES, _MAX_SIDE = 6, 320


def contact_sheet(title: str, samples: Sequence[tuple[str, dict[str, np.ndarray]]]) -> Image.Image:
    """Draw the sheet.

    Args:
        title: Heading.
        samples: For each sample its caption and its strips by label, each uint8 [F, H, W, 3] of one size.
    """
    blocks = [(caption, {label: _strip(frames) for label, frames in strips.items()}) for caption, strips in samples]
    strips = [strip for _, by_label in blocks for strip in by_label.values()]
    width = _LABEL_WIDTH + max(strip.width for strip in strips) + _GAP
    height = _TEXT_HEIGHT * (2 + 2 * len(blocks)) + sum(strip.height + _GAP for strip in strips)
    sheet = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    draw.text((_GAP, _GAP), title, fill="black", font=ImageFont.load_default(17))
    top = 2 * _TEXT_HEIGHT
    for caption, by_label in blocks:
        draw.text((_LABEL_WIDTH, top), caption, fill="black", font=font)
        top += _TEXT_HEIGHT
        for label, strip in by_label.items():
            draw.text((_GAP, top + strip.height // 2 - 8), label, fill="black", font=font)
            sheet.paste(strip, (_LABEL_WIDTH, top))
            top += strip.height + _GAP
        top += _TEXT_HEIGHT
    return sheet


def shown_frames(frames: np.ndarray) -> np.ndarray:
    """What a sheet shows of uint8 [F, H, W, 3]: frames evenly spaced, large ones made small; given those, the same."""
    shown = frames[np.linspace(0, len(frames) - 1, min(len(frames), _MAX_FRAMES)).round().astype(int)]
    height, width = shown.shape[1:3]
    if max(height, width) <= _MAX_SIDE:
        return shown
    scale = _MAX_SIDE / max(height, width)
    return np.stack([_resized(frame, round(height * scale), round(width * scale)) for frame in shown])


def _strip(frames: np.ndarray) -> Image.Image:
    shown = shown_frames(frames)
    scale = min(_SCALE, _MAX_SIDE / max(shown.shape[1:3]))
    height, width = (round(side * scale) for side in shown.shape[1:3])
    strip = Image.new("RGB", (len(shown) * (width + _GAP) - _GAP, height), "white")
    for place, frame in enumerate(shown):
        strip.paste(Image.fromarray(_resized(frame, height, width)), (place * (width + _GAP), 0))
    return strip


def _resized(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(frame).resize((width, height)))
