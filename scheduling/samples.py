"""`SampleTable`: what scheduling knows about each sample. It never touches media."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import ArrayLike, NDArray

from adaptiveload.scheduling.shapes import LatentGeometry, Shape

MIX_TEXT_LEN = 512  # a mix says nothing about captions; Wan pads every caption to 512 rows


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Columns of the samples of one data set, in the order of its index.

    Attributes:
        keys: Name of each sample. Ten million Python strings take gigabytes, so whoever makes a table of an index
            gives a sequence that makes them when asked.
        sources: The video or picture that each sample was cut from.
        shapes: Distinct pixel shapes, sorted.
        shape_ids: int32 [n], index into `shapes`: the sample's bucket.
        num_tokens: int64 [n], tokens after patchifying, text not included.
        text_len: int32 [n], text tokens.
    """

    keys: Sequence[str]
    sources: Sequence[str]
    shapes: tuple[Shape, ...]
    shape_ids: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    text_len: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def shape_tokens(self) -> NDArray[np.int64]:
        """int64 [num shapes], tokens of one sample of each shape."""
        tokens = np.zeros(len(self.shapes), np.int64)
        tokens[self.shape_ids] = self.num_tokens
        return tokens

    @classmethod
    def from_columns(
        cls,
        keys: Sequence[str],
        sources: Sequence[str],
        frames: ArrayLike,
        heights: ArrayLike,
        widths: ArrayLike,
        text_lens: ArrayLike,
        geometry: LatentGeometry,
    ) -> "SampleTable":
        """Table from the columns of an index, one entry a sample; frames, heights and widths in pixels.

        Raises:
            ValueError: If the columns are empty or differ in length, or a shape does not fill whole tokens of
                `geometry`; the message names the first such key.
        """
        columns = [np.asarray(column) for column in (frames, heights, widths, text_lens)]
        lengths = [len(keys), len(sources), *(len(column) for column in columns)]
        if not lengths[0]:
            raise ValueError("the index has no samples")
        if len(set(lengths)) > 1:
            raise ValueError(f"columns of the index differ in length: {lengths}")
        # One integer a shape: sorting those is ten times as fast as sorting rows.
        codes = columns[0].astype(np.int64)
        for column in columns[1:3]:
            codes = (codes << 20) + column
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        shapes = tuple(Shape(*(int(column[row]) for column in columns[:3])) for row in first)
        for shape, row in sorted(zip(shapes, first, strict=True), key=lambda pair: int(pair[1])):
            geometry.check(shape, f"sample {keys[row]!r}")
        tokens = np.array([geometry.num_tokens(shape) for shape in shapes], np.int64)
        shape_ids: NDArray[np.int32] = inverse.reshape(-1).astype(np.int32)
        return cls(keys, sources, shapes, shape_ids, tokens[shape_ids], columns[3].astype(np.int32))

    @classmethod
    def from_mix(
        cls, path: str | Path, num_samples: int, seed: int, geometry: LatentGeometry | None = None
    ) -> "SampleTable":
        """Table of `num_samples` random samples of the shape mix at `path`, to simulate with. Each is its own source.

        Raises:
            ValueError: If `num_samples` is not positive, or the file is no mix (`shapes:` with frames, height, width
                and a positive share each).
        """
        if num_samples < 1:
            raise ValueError(f"a mix needs a positive number of samples, got {num_samples}")
        document = yaml.safe_load(Path(path).read_text())
        try:
            rows = [(int(row["frames"]), int(row["height"]), int(row["width"])) for row in document["shapes"]]
            shares = np.array([float(row["share"]) for row in document["shapes"]])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is no shape mix: every shape needs frames, height, width and share") from error
        if not len(shares) or not (shares > 0).all():
            raise ValueError(f"{path}: every share must be positive")
        edges = np.cumsum(shares) / shares.sum()
        uniform = (np.random.Philox(key=seed).random_raw(num_samples) >> np.uint64(11)) / 2.0**53
        picked = np.array(rows)[np.minimum(np.searchsorted(edges, uniform, side="right"), len(rows) - 1)]
        keys = [f"{Path(path).stem}-{number:09d}" for number in range(num_samples)]
        frames, heights, widths = picked.T
        text_lens = np.full(num_samples, MIX_TEXT_LEN)
        return cls.from_columns(keys, keys, frames, heights, widths, text_lens, geometry or LatentGeometry())
