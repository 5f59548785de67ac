"""Runs of equal length inside a packed sequence: what lets ragged data be computed as a few dense blocks."""

from collections.abc import Iterable
from itertools import groupby
from typing import TypeVar

import torch

T = TypeVar("T")


def merge_runs(values: Iterable[T]) -> list[tuple[int, T]]:
    """Neighbouring equal values merged, as (count, value) in order: [3, 3, 5] -> [(2, 3), (1, 5)]."""
    return [(len(list(run)), value) for value, run in groupby(values)]


def equal_runs(offsets: torch.Tensor) -> list[tuple[int, int]]:
    """Neighbouring segments of equal length merged, as (number of segments, length) in order.

    Args:
        offsets: First token of each segment, and the end of the last: integers [num_segments + 1], rising from 0.

    Raises:
        ValueError: If `offsets` is not a 1-D tensor on the CPU. Reading a CUDA tensor here would make the host wait
            for the device in every layer.
    """
    if offsets.device.type != "cpu" or offsets.ndim != 1:
        shape = list(offsets.shape)
        raise ValueError(f"offsets must be a CPU tensor [num_segments + 1], got {shape} on {offsets.device}")
    return merge_runs(offsets.diff().tolist())
