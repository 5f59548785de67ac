"""Writing clips."""

import os
from fractions import Fraction
from pathlib import Path

import numpy as np


def write_mp4(path: str | Path, frames: np.ndarray, fps: float, crf: int = 18) -> None:
    """Write uint8 [F, H, W, 3] as an H.264 mp4 that ordinary players show; the file appears whole or not at all.

    Args:
        path: File to write; its folder must exist.
        frames: uint8 [F, H, W, 3] with even H and W.
        fps: Frames per second.
        crf: Quality of x264, 0 (lossless) to 51.

    Raises:
        ValueError: If `frames` has another type, an odd side, or no frame.
    """
    import av  # a run without previews needs no codecs

    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"frames must be uint8 [F, H, W, 3], got {frames.dtype} {list(frames.shape)}")
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise ValueError(f"frames {height}x{width}: yuv420p needs even sides")
    unfinished = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.mp4")
    try:
        with av.open(str(unfinished), "w") as container:
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(100_000))
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.options = {"crf": str(crf)}
            for picture in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
            container.mux(stream.encode(None))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
