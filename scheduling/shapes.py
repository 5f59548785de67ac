"""Pixel shapes and what a model makes of them: latent size, token grid, token count.

The one place that knows the VAE's strides and the patch size; `data` and `models` both get a `LatentGeometry`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Pixel size of one sample. A picture is a clip of one frame."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


class TokenGrid(NamedTuple):
    """Tokens of one sample along frames, rows and columns."""

    frames: int
    rows: int
    columns: int


@dataclass(frozen=True)
class LatentGeometry:
    """Strides of a video VAE and of the model's patches. The default is Wan 2.1 (VAE 4x8x8, patch 1x2x2).

    Attributes:
        channels: Latent channels.
        temporal_stride: Pixel frames in one latent frame; the first latent frame holds one pixel frame alone.
        spatial_stride: Pixels in one latent row or column.
        patch: Latent frames, rows and columns in one token.
    """

    channels: int = 16
    temporal_stride: int = 4
    spatial_stride: int = 8
    patch: tuple[int, int, int] = (1, 2, 2)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "LatentGeometry":
        """What `dataclasses.asdict` became in JSON. Raises KeyError or TypeError if it is something else."""
        return cls(**{**values, "patch": tuple(values["patch"])})

    @property
    def pixel_multiple(self) -> tuple[int, int]:
        """Height and width must be multiples of these many pixels."""
        return self.spatial_stride * self.patch[1], self.spatial_stride * self.patch[2]

    @property
    def token_size(self) -> int:
        """Latent elements in one token."""
        return self.channels * self.patch[0] * self.patch[1] * self.patch[2]

    def check(self, shape: Shape, name: str = "shape") -> None:
        """Raise ValueError unless `shape` fills whole tokens; `name` says what has that shape."""
        frames, height, width = shape
        if min(frames, height, width) < 1:
            raise ValueError(f"{name} {shape}: frames, height and width must be positive")
        if (frames - 1) % self.temporal_stride:
            low = frames - 1 - (frames - 1) % self.temporal_stride + 1
            raise ValueError(
                f"{name} {shape}: {frames} frames is not {self.temporal_stride}k+1; "
                f"use {low} or {low + self.temporal_stride}"
            )
        if ((frames - 1) // self.temporal_stride + 1) % self.patch[0]:
            raise ValueError(f"{name} {shape}: latent frames must be a multiple of {self.patch[0]}")
        for what, size, multiple in zip(("height", "width"), (height, width), self.pixel_multiple, strict=True):
            if size % multiple:
                raise ValueError(
                    f"{name} {shape}: {what} {size} is not a multiple of {multiple}; "
                    f"use {max(size // multiple, 1) * multiple} or {(size // multiple + 1) * multiple}"
                )

    def latent_size(self, shape: Shape) -> tuple[int, int, int, int]:
        """Latent channels, frames, rows and columns of `shape`.

        Raises:
            ValueError: If frames are not `temporal_stride`*k + 1, or a side is not a multiple of `pixel_multiple`.
        """
        self.check(shape)
        return (
            self.channels,
            (shape.frames - 1) // self.temporal_stride + 1,
            shape.height // self.spatial_stride,
            shape.width // self.spatial_stride,
        )

    def token_grid(self, shape: Shape) -> TokenGrid:
        """Tokens of `shape` along frames, rows and columns. Raises ValueError as `latent_size` does."""
        _, frames, rows, columns = self.latent_size(shape)
        return TokenGrid(frames // self.patch[0], rows // self.patch[1], columns // self.patch[2])

    def num_tokens(self, shape: Shape) -> int:
        """Tokens in one sample of `shape`: ((frames-1)/4+1) * (height/16) * (width/16) for Wan 2.1."""
        grid = self.token_grid(shape)
        return grid.frames * grid.rows * grid.columns
