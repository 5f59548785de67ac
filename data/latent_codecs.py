"""Latent codecs: pixels to latents and back. The built-in one has 16 channels at 1/4 of the frames, 1/8 of each side.

F, H, W are pixel frames, rows and columns; f = (F-1)/4+1, h = H/8, w = W/8 those of the latents, C their channels. The
first latent frame holds the first pixel frame alone, every later one four, so a prefix of 4k+1 frames has a prefix of
the latents.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from einops import rearrange

from adaptiveload.scheduling.shapes import LatentGeometry

TEMPORAL_STRIDE = 4
SPATIAL_STRIDE = 8


class LatentCodec(Protocol):
    """What preparation and sampling need of a codec.

    Attributes:
        name: Stored with every sample.
        geometry: Channels and strides of the latents, and the patch that models make of them.
        normalization_hash: Changes whenever equal pixels would give other latents.
        settings: What else decides about the latents' values, such as the precision.
    """

    name: str
    geometry: LatentGeometry
    normalization_hash: str
    settings: str

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """uint8 [F, H, W, 3] -> normalised float32 [C, f, h, w]. Raises ValueError if these are not whole."""

    def encode_batch(self, clips: Sequence[np.ndarray]) -> list[np.ndarray]:
        """`encode` of clips of one shape."""

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """float32 [C, f, h, w] -> uint8 [F, H, W, 3]."""

    def to(self, device: str) -> None:
        """Move what it computes with; codecs without weights stay."""


# Kept coefficients as (temporal, vertical, horizontal) frequencies. Channel i of both kinds of latent frame is the same
# spatial frequency where it can be: a later frame spends the last four luma channels on motion instead of detail.
_PLANE_6 = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 2, 0), (0, 1, 1), (0, 0, 2)]
_FIRST_LUMA = [*_PLANE_6, (0, 0, 3), (0, 1, 2), (0, 2, 1), (0, 3, 0)]
_LATER_LUMA = [*_PLANE_6, (1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]
_CHROMA = [(0, 0, 0), (0, 0, 1), (0, 1, 0)]

# BT.601, full range; luma and chroma are centred on 0.
_RGB_TO_YCC = np.array(
    [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]], dtype=np.float32
)
_YCC_TO_RGB = np.linalg.inv(_RGB_TO_YCC.astype(np.float64)).astype(np.float32)

# Mean and std of the raw coefficients over the quickstart samples: `latent_stats` in report.json of a preparation says
# what is left of them, per kind of frame; new constant = old mean + old std * that mean, old std * that std.
_FIRST_MEAN = np.array([-177, -3, 0, 0, 0, -1, 0, 0, 0, 0, -44, 0, 2, 23, 0, 0], dtype=np.float32)
_FIRST_STD = np.array(
    [441, 109, 111, 55.4, 55.8, 54.7, 36.8, 34.4, 35, 36.2, 119, 19.6, 22.7, 107, 18.2, 21.5], dtype=np.float32
)
_LATER_MEAN = np.array([-370, -12, -4, 1, 0, -2, -5, 0, 0, 1, -92, 0, 6, 1, 0, -1], dtype=np.float32)
_LATER_STD = np.array(
    [787, 198, 208, 110, 95, 97.5, 124, 50.5, 53, 68.5, 241, 41.9, 54.2, 107, 29.5, 36.6], dtype=np.float32
)


class DctCodec:
    """Weights-free codec: the lowest frequencies of each block of pixels, in YCbCr, scaled to unit variance.

    A first latent frame has 10 luma and 3 + 3 chroma coefficients of each 8x8 block; a later one as many of each
    4x8x8 block. Decoding gives a recognisable, blurred picture.
    """

    name = "dct"
    geometry = LatentGeometry()
    settings = "fp32"

    def __init__(self):
        self._first = _basis(1, _FIRST_LUMA), _basis(1, _CHROMA)
        self._later = _basis(TEMPORAL_STRIDE, _LATER_LUMA), _basis(TEMPORAL_STRIDE, _CHROMA)
        constants = np.stack([_FIRST_MEAN, _FIRST_STD, _LATER_MEAN, _LATER_STD])
        self.normalization_hash = hashlib.blake2b(self.name.encode() + constants.tobytes(), digest_size=8).hexdigest()

    def encode(self, frames: np.ndarray) -> np.ndarray:
        """uint8 [F, H, W, 3] -> float32 [16, f, h, w], about unit variance per channel.

        Raises:
            ValueError: If `frames` is not uint8 [4k+1, 8a, 8b, 3].
        """
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
            raise ValueError(f"frames must be uint8 [F, H, W, 3], got {frames.dtype} {list(frames.shape)}")
        count, height, width, _ = frames.shape
        if (count - 1) % TEMPORAL_STRIDE or height % SPATIAL_STRIDE or width % SPATIAL_STRIDE:
            raise ValueError(f"frames {count}x{height}x{width} must be 4k+1 frames with sides that are multiples of 8")
        ycc = frames.astype(np.float32) @ _RGB_TO_YCC.T
        ycc[..., 0] -= 128.0
        first = (_analyse(ycc[:1], 1, self._first) - _FIRST_MEAN) / _FIRST_STD
        later = (_analyse(ycc[1:], TEMPORAL_STRIDE, self._later) - _LATER_MEAN) / _LATER_STD
        return np.ascontiguousarray(rearrange(np.concatenate([first, later]), "f y x c -> c f y x"), dtype=np.float32)

    def encode_batch(self, clips: Sequence[np.ndarray]) -> list[np.ndarray]:
        """`encode` of each clip."""
        return [self.encode(frames) for frames in clips]

    def to(self, device: str) -> None:
        """It has no weights."""

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """float32 [16, f, h, w] -> uint8 [F, H, W, 3], clipped to the range of a byte.

        Raises:
            ValueError: If `latents` is not [16, f, h, w].
        """
        if latents.ndim != 4 or latents.shape[0] != 16 or 0 in latents.shape:
            raise ValueError(f"latents must be [16, f, h, w], got {list(latents.shape)}")
        coefficients = rearrange(latents.astype(np.float32), "c f y x -> f y x c")
        first = _synthesise(coefficients[:1] * _FIRST_STD + _FIRST_MEAN, 1, self._first)
        later = _synthesise(coefficients[1:] * _LATER_STD + _LATER_MEAN, TEMPORAL_STRIDE, self._later)
        ycc = np.concatenate([first, later])
        ycc[..., 0] += 128.0
        return np.clip(np.rint(ycc @ _YCC_TO_RGB.T), 0, 255).astype(np.uint8)


def psnr_db(frames: np.ndarray, decoded: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two uint8 arrays of equal shape, in dB; at most 100, for equal arrays too."""
    error = np.mean((frames.astype(np.float32) - decoded.astype(np.float32)) ** 2, dtype=np.float64)
    return float(min(10 * np.log10(255.0**2 / max(error, 1e-9)), 100.0))


def _dct_matrix(size: int) -> np.ndarray:
    """Orthonormal DCT-II, [frequency, position]."""
    position = (np.arange(size) + 0.5) * np.pi / size
    matrix = np.cos(np.arange(size)[:, None] * position) * np.sqrt(2 / size)
    matrix[0] /= np.sqrt(2)
    return matrix


def _basis(depth: int, frequencies: list[tuple[int, int, int]]) -> np.ndarray:
    """Block patterns of the kept coefficients, orthonormal rows: float32 [k, depth * 64]."""
    time, space = _dct_matrix(depth), _dct_matrix(SPATIAL_STRIDE)
    patterns = [np.einsum("t,y,x->tyx", time[t], space[v], space[u]) for t, v, u in frequencies]
    return np.stack([pattern.ravel() for pattern in patterns]).astype(np.float32)


def _analyse(ycc: np.ndarray, depth: int, bases: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    blocks = rearrange(ycc, "(f t) (y py) (x px) c -> c f y x (t py px)", t=depth, py=SPATIAL_STRIDE, px=SPATIAL_STRIDE)
    luma, chroma = bases
    return np.concatenate([blocks[0] @ luma.T, blocks[1] @ chroma.T, blocks[2] @ chroma.T], axis=-1)  # [f, y, x, 16]


def _synthesise(coefficients: np.ndarray, depth: int, bases: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    luma, chroma = bases
    parts = np.split(coefficients, np.cumsum([len(luma), len(chroma)]), axis=-1)
    blocks = np.stack([parts[0] @ luma, parts[1] @ chroma, parts[2] @ chroma])  # [3, f, y, x, t*64]
    return rearrange(
        blocks, "c f y x (t py px) -> (f t) (y py) (x px) c", t=depth, py=SPATIAL_STRIDE, px=SPATIAL_STRIDE
    )
