"""Strips of frames under each other: for each sample its clip, the codec's reconstruction, what the model made."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_SCALE, _GAP, _LABEL_WIDTH, _TEXT_HEIGHT = 1.5, 6, 70, 24


def contact_sheet(title: str, samples: Sequence[tuple[str, dict[str, np.ndarray]]], max_frames: int = 6) -> Image.Image:
    """Draw the sheet.

    Args:
        title: Heading.
        samples: For each sample its caption and its strips by label, each uint8 [F, H, W, 3] of one size.
        max_frames: Most frames shown of a strip, evenly spaced.
    """
    blocks = [
        (caption, {label: _strip(frames, max_frames) for label, frames in strips.items()})
        for caption, strips in samples
    ]
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


def _strip(frames: np.ndarray, max_frames: int) -> Image.Image:
    shown = np.linspace(0, len(frames) - 1, min(len(frames), max_frames)).round().astype(int)
    height, width = (round(side * _SCALE) for side in frames.shape[1:3])
    strip = Image.new("RGB", (len(shown) * (width + _GAP) - _GAP, height), "white")
    for place, k in enumerate(shown):
        strip.paste(Image.fromarray(frames[k]).resize((width, height)), (place * (width + _GAP), 0))
    return strip
