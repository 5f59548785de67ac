"""`SampleTable`: what scheduling knows about each sample. It never touches media."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import ArrayLike, NDArray

from adaptiveload.scheduling.shapes import LatentGeometry, Shape

MIX_ORDERS = ("random", "clustered")
MIX_TEXT_LEN = 512  # a mix says nothing about captions; Wan pads every caption to 512 rows


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Columns of the samples of one data set, in the order of its index.

    Attributes:
        keys: Name of each sample, unique but for a mix. Ten million Python strings take gigabytes, so whoever makes a
            table of an index gives a sequence that makes them when asked.
        sources: The video or picture that each sample was cut from.
        shapes: Distinct pixel shapes, sorted.
        shape_ids: int32 [n], index into `shapes`: the sample's bucket.
        num_tokens: int64 [n], tokens after patchifying, text not included.
        text_len: int32 [n], text tokens.
        text_joins: Whether the model computes text rows as tokens of the sequence.
    """

    keys: Sequence[str] | NDArray[Any]
    sources: Sequence[str] | NDArray[Any]
    shapes: tuple[Shape, ...]
    shape_ids: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    text_len: NDArray[np.int32]
    text_joins: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    def computed_tokens(self, ids: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Tokens of the samples `ids`, or of all, that cost and memory go by: text counts where it joins; int64."""
        rows = slice(None) if ids is None else ids
        return self.num_tokens[rows] + self.text_len[rows] if self.text_joins else self.num_tokens[rows]

    @property
    def longest_joined_text(self) -> int:
        """Most text tokens that a sample adds to its sequence."""
        return int(self.text_len.max()) if self.text_joins else 0

    @property
    def shape_tokens(self) -> NDArray[np.int64]:
        """int64 [num shapes], tokens of one sample of each shape."""
        tokens = np.zeros(len(self.shapes), np.int64)
        tokens[self.shape_ids] = self.num_tokens
        return tokens

    @classmethod
    def of_lengths(cls, num_tokens: NDArray[np.int64], counts: NDArray[np.int64]) -> "SampleTable":
        """Table of `counts` samples of each length, both int64 [num shapes], whose shapes nobody asks for."""
        shapes = tuple(Shape(1, 1, int(tokens)) for tokens in num_tokens)
        shape_ids = np.repeat(np.arange(len(shapes)), counts).astype(np.int32)
        names = np.array([f"{tokens} tokens" for tokens in num_tokens], object)[shape_ids]
        text_len = np.full(len(shape_ids), MIX_TEXT_LEN, np.int32)
        return cls(names, names, shapes, shape_ids, np.asarray(num_tokens, np.int64)[shape_ids], text_len)

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
        """Table of `num_samples` random samples of the shape mix at `path`, to simulate with.

        A mix is YAML with `shapes:`, a list of frames, height, width and share of the samples each, and an optional
        `order:`: "random" (default), or "clustered", where samples of one length lie side by side in the index, as in
        a data set that was written source by source. Samples are named and sourced by their shape.

        Raises:
            ValueError: If `num_samples` is not positive, or the file is missing or no mix; it names file and entry.
        """
        if num_samples < 1:
            raise ValueError(f"a mix needs a positive number of samples, got {num_samples}")
        geometry = geometry or LatentGeometry()
        rows, shares, order = _read_mix(path, geometry)
        tokens_of = np.array([geometry.num_tokens(shape) for shape in rows], np.int64)
        edges = np.cumsum(shares) / shares.sum()
        uniform = (np.random.Philox(key=seed).random_raw(num_samples) >> np.uint64(11)) / 2.0**53
        drawn = np.minimum(np.searchsorted(edges, uniform, side="right"), len(rows) - 1)
        if order == "clustered":
            drawn = drawn[np.argsort(tokens_of[drawn], kind="stable")]
        present = sorted(np.unique(drawn).tolist(), key=lambda row: rows[row])
        shape_of_row = np.zeros(len(rows), np.int32)
        shape_of_row[present] = np.arange(len(present))
        names = np.array([f"{Path(path).stem}-{shape}" for shape in rows], object)[drawn]
        return cls(
            names,
            names,
            tuple(rows[row] for row in present),
            shape_of_row[drawn],
            tokens_of[drawn],
            np.full(num_samples, MIX_TEXT_LEN, np.int32),
        )


def _read_mix(path: str | Path, geometry: LatentGeometry) -> tuple[list[Shape], NDArray[np.float64], str]:
    """Shapes, shares and order of the mix at `path`. Raises ValueError as `SampleTable.from_mix`."""
    try:
        document = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"shape mix {path} cannot be read: {error}") from error
    entries = document.get("shapes") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} is no shape mix: it needs `shapes:`, a list of frames, height, width and share each")
    shares: dict[Shape, float] = {}
    for entry in entries:
        try:
            shape = Shape(int(entry["frames"]), int(entry["height"]), int(entry["width"]))
            share = float(entry["share"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {entry!r} does not give frames, height, width and share as numbers") from error
        geometry.check(shape, f"{path}: shape")
        if not 0 < share < np.inf:
            raise ValueError(f"{path}: share {share} of {shape} must be positive")
        if shape in shares:
            raise ValueError(f"{path}: shape {shape} is given twice")
        shares[shape] = share
    order = document.get("order", "random")
    if order not in MIX_ORDERS:
        raise ValueError(f"{path}: order must be one of {', '.join(MIX_ORDERS)}, got {order!r}")
    return list(shares), np.array(list(shares.values())), order
