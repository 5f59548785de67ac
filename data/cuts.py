"""Which samples a picture or clip gives: target shapes that fit, start times and crops.

The rules, for every item and every target shape:
- a picture serves the shapes of one frame, a clip those of more frames; a clip too short for all of these serves the
  shapes of one frame. Nothing is padded: a clip serves a shape only if it has the frames;
- bringing the item to the shape's aspect ratio may cut off at most `max_crop` of its area;
- nothing is enlarged by more than `max_upscale`;
- shapes made from a pixel budget are aspect buckets: an item serves the one that cuts off least, of each budget and
  number of frames;
- a clip gives up to `clips_per_shape` samples per shape; `selection` says where they begin. A picture gives
  `crops_per_shape`. The first is the largest centred crop, the others are smaller ones at random places.
"""

import hashlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from adaptiveload.scheduling.shapes import LatentGeometry, Shape

LENGTHS = ("all", "longest")
SELECTIONS = ("spread", "start", "middle", "random", "sliding")


@dataclass(frozen=True)
class CutConfig:
    """How items are cut into samples; the keys of the preparation's YAML file.

    Attributes:
        shapes: Target shapes (frames, height, width), all of which an item may serve.
        budgets: Pixels (height * width) of aspect buckets: the largest sizes within each, of every aspect ratio.
        frames: Frames of the samples of the aspect buckets.
        max_aspect: Longest side over shortest, of aspect buckets.
        lengths: "all" serves every number of frames that a clip has, "longest" only the largest of them.
        selection: Where samples of a clip begin: "spread" evenly from start to end and at least half a sample apart,
            "start", "middle", "random", or "sliding" (end to end, all that fit; `clips_per_shape` does not limit it).
        fps: Frame rate of the samples.
        clips_per_shape: Most samples of one shape from one clip.
        crops_per_shape: Samples of one shape from one picture.
        max_crop: Share of the area that may be lost to reach the shape's aspect ratio, 0 to 1.
        max_upscale: Largest enlargement of a side.
        min_crop_scale: Side of the smallest random crop, relative to the largest possible one.
        geometry: Of the codec: shapes must fill whole tokens. Not a key of the file.
    """

    shapes: tuple[Shape, ...] = ()
    budgets: tuple[int, ...] = ()
    frames: tuple[int, ...] = ()
    max_aspect: float = 2.0
    lengths: str = "all"
    selection: str = "spread"
    fps: float = 16.0
    clips_per_shape: int = 1
    crops_per_shape: int = 1
    max_crop: float = 0.35
    max_upscale: float = 1.0
    min_crop_scale: float = 0.7
    geometry: LatentGeometry = field(default_factory=LatentGeometry)

    def __post_init__(self):
        if bool(self.budgets) != bool(self.frames):
            raise ValueError(f"`budgets` {self.budgets} and `frames` {self.frames} go together")
        if not self.groups:
            raise ValueError("`shapes` is empty: name at least one frames, height, width, or `budgets` and `frames`")
        for shape in (shape for group in self.groups for shape in group):
            self.geometry.check(shape, "target shape (key `shapes`)")
        for key, known in (("lengths", LENGTHS), ("selection", SELECTIONS)):
            if getattr(self, key) not in known:
                raise ValueError(f"`{key}` is {getattr(self, key)!r}, expected one of {', '.join(known)}")
        if not self.max_aspect >= 1:
            raise ValueError(f"`max_aspect` must be at least 1, got {self.max_aspect}")
        for key in ("fps", "clips_per_shape", "crops_per_shape", "max_upscale"):
            if not getattr(self, key) > 0:
                raise ValueError(f"`{key}` must be positive, got {getattr(self, key)}")
        if not 0 <= self.max_crop < 1:
            raise ValueError(f"`max_crop` must be at least 0 and below 1, got {self.max_crop}")
        if not 0 < self.min_crop_scale <= 1:
            raise ValueError(f"`min_crop_scale` must be above 0 and at most 1, got {self.min_crop_scale}")

    @cached_property
    def groups(self) -> tuple[tuple[Shape, ...], ...]:
        """Target shapes; of each group an item serves the one that fits best."""
        buckets = (
            tuple(Shape(frames, *size) for size in aspect_sizes(pixels, self.max_aspect, self.geometry))
            for pixels in self.budgets
            for frames in self.frames
        )
        return (*((shape,) for shape in self.shapes), *buckets)

    @classmethod
    def load(cls, path: Path | None, shapes: str | None = None, geometry: LatentGeometry | None = None) -> "CutConfig":
        """Configuration from a YAML file, `shapes` (such as "1,64,64;17,64,96") in place of the file's.

        Raises:
            ValueError: If the file cannot be read, a key is unknown, a value has the wrong type or range, or no shapes
                are given.
        """
        values: dict[str, Any] = {}
        try:
            if path is not None:
                values = yaml.safe_load(path.read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{path} (rules for cutting) cannot be read: {error}") from error
        types = {field.name: field.type for field in fields(cls) if field.name != "geometry"}
        if not isinstance(values, dict) or values.keys() - types.keys():
            unknown = sorted(values.keys() - types.keys()) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"{path}: unknown {unknown}; the keys are {', '.join(types)}")
        for key, value in values.items():
            wanted, name = {float: ((int, float), "a number"), int: (int, "an integer"), str: (str, "a word")}.get(
                types[key], (list, "a list")
            )
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ValueError(f"{path}: `{key}` is {value!r}, expected {name}")
        given = [part.split(",") for part in shapes.split(";")] if shapes else values.pop("shapes", [])
        for key in values.keys() & {"budgets", "frames"}:
            if not all(isinstance(number, int) and number > 0 for number in values[key]):
                raise ValueError(f"{path}: `{key}` is {values[key]}, expected positive integers")
            values[key] = tuple(values[key])
        shapes_given = tuple(_shape(numbers) for numbers in given)
        return cls(**{**values, "shapes": shapes_given, "geometry": geometry or LatentGeometry()})


def aspect_sizes(pixels: int, max_aspect: float, geometry: LatentGeometry) -> list[tuple[int, int]]:
    """Heights and widths within `pixels`, multiples of whole tokens, that could not be larger on either side.

    Raises:
        ValueError: If nothing fits into so few pixels.
    """
    rows, columns = geometry.pixel_multiple
    widths: dict[int, int] = {}  # the largest height of each width
    for height in range(rows, pixels // columns + 1, rows):
        width = pixels // height // columns * columns
        if width and max(height / width, width / height) <= max_aspect:
            widths[width] = height
    if not widths:
        raise ValueError(f"no size within {pixels} pixels (key `budgets`) has an aspect of at most {max_aspect:g}")
    return sorted((height, width) for width, height in widths.items())


def _shape(numbers: Any) -> Shape:
    try:
        return Shape(*(int(number) for number in numbers))
    except (TypeError, ValueError) as error:
        raise ValueError(f"shape {numbers!r} (key `shapes`) is not frames, height, width") from error


@dataclass(frozen=True)
class Cut:
    """One sample to be: frames [start, start + shape.frames), part `box` = (left, top, right, bottom) in pixels."""

    shape: Shape
    start: int
    box: tuple[float, float, float, float]


def plan_cuts(
    source: str, is_video: bool, num_frames: int, height: int, width: int, config: CutConfig
) -> tuple[list[Cut], str]:
    """Samples of one item (rules above), and why there are none if so.

    Args:
        source: Name of the item; with the shape it seeds the random crops.
        is_video: Whether it is a clip.
        num_frames: Frames at `config.fps`; 1 for a picture.
        height: Upright height in pixels.
        width: Upright width in pixels.
        config: The rules' numbers.
    """
    every = [shape for group in config.groups for shape in group]
    shapes = [shape for shape in every if (shape.frames > 1) == is_video and shape.frames <= num_frames]
    if is_video and not shapes:
        shapes = [shape for shape in every if shape.frames == 1]
    if config.lengths == "longest":
        longest = max((shape.frames for shape in shapes), default=0)
        shapes = [shape for shape in shapes if shape.frames == longest]
    if not shapes:
        shortest = min(shape.frames for shape in every)
        return [], f"{num_frames} frames at {config.fps:g} fps, the shortest shape has {shortest}"
    shapes = [shape for shape in shapes if _lost_area(shape, height, width) <= config.max_crop]
    if not shapes:
        return [], f"{height}x{width}: every shape would cut off more than {config.max_crop:g} of the area (max_crop)"
    shapes = [shape for shape in shapes if _upscale(shape, height, width) <= config.max_upscale]
    if not shapes:
        return [], f"{height}x{width}: too small for every shape at an enlargement of {config.max_upscale:g}"
    shapes = [
        min(fitting, key=lambda shape: (_lost_area(shape, height, width), shape))
        for group in config.groups
        if (fitting := [shape for shape in group if shape in shapes])
    ]
    return [
        cut
        for shape in dict.fromkeys(shapes)
        for cut in _cuts_of_shape(source, shape, num_frames, height, width, config)
    ], ""


def _lost_area(shape: Shape, height: int, width: int) -> float:
    ratio = (width / height) / (shape.width / shape.height)
    return 1 - min(ratio, 1 / ratio)


def _upscale(shape: Shape, height: int, width: int) -> float:
    return max(shape.height / height, shape.width / width)


def _cuts_of_shape(source: str, shape: Shape, num_frames: int, height: int, width: int, config: CutConfig) -> list[Cut]:
    key = hashlib.blake2b(f"{source}\0{shape}".encode(), digest_size=16).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    if shape.frames > 1:
        starts = _starts(num_frames, shape.frames, config, rng)
    else:
        starts = np.linspace(0, num_frames - 1, config.crops_per_shape).astype(int)
    # The smallest crop that need not be enlarged beyond the limit.
    least = max(config.min_crop_scale, _upscale(shape, height, width) / config.max_upscale)
    cuts = []
    for number, start in enumerate(starts):
        scale, down, right = rng.uniform(min(least, 1.0), 1.0), *rng.uniform(size=2)
        if number == 0:
            scale, down, right = 1.0, 0.5, 0.5
        cuts.append(Cut(shape, int(start), _box(shape, height, width, scale, down, right)))
    return cuts


def _starts(num_frames: int, frames: int, config: CutConfig, rng: np.random.Generator) -> np.ndarray:
    """First frames of the samples of `frames` frames, in order."""
    last, count = num_frames - frames, config.clips_per_shape
    if config.selection == "start":
        return np.zeros(1, int)
    if config.selection == "middle":
        return np.array([last // 2])
    if config.selection == "sliding":
        return np.arange(0, last + 1, frames)
    if config.selection == "random":
        return np.sort(rng.permutation(last + 1)[:count])
    return np.linspace(0, last, min(count, 1 + last // (frames // 2))).astype(int)


def _box(shape: Shape, height: int, width: int, scale: float, down: float, right: float) -> tuple:
    """Crop of the shape's aspect: `scale` of the largest one, placed at (down, right) of the free room, 0 to 1."""
    unit = scale * min(height / shape.height, width / shape.width)
    box_height, box_width = unit * shape.height, unit * shape.width
    top, left = down * (height - box_height), right * (width - box_width)
    return left, top, min(left + box_width, width), min(top + box_height, height)
