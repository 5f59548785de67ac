"""Angles of the rotary position embedding over latent frames, rows and columns (Wan 2.1); and over text (Qwen-Image).

Legend: `N` tokens of all samples side by side, `M` their text rows, `hd` head dim, `F`, `Y`, `X` tokens of
one sample along frames, rows and columns.
"""

from collections.abc import Sequence

import torch

from adaptiveload.models.packing import Grid, to_device

THETA = 10_000.0


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Real dims of a head that turn with frames, rows and columns: 44, 42, 42 of 128."""
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def rotary_table(grids: tuple[Grid, ...], head_dim: int, device: torch.device) -> torch.Tensor:
    """Rotation of every token of every sample as a unit complex number: complex64 [N, hd / 2].

    Positions start at 0 on each axis. Angles are float64 until their cosine and sine are rounded once.
    """
    tables = {grid: _grid_table(grid, head_dim, device) for grid in dict.fromkeys(grids)}
    return torch.cat([tables[grid] for grid in grids])


def _grid_table(grid: Grid, head_dim: int, device: torch.device) -> torch.Tensor:
    """complex64 [F*Y*X, hd / 2], tokens in row-major order."""
    return _axis_turns([range(size) for size in grid], axis_dims(head_dim), device)


def joint_rotary_tables(
    grids: tuple[Grid, ...], text_lens: Sequence[int], dims: tuple[int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotations of image and text tokens for joint attention, as Qwen-Image has them: complex64 [N or M, hd / 2].

    Frames count from 0, rows and columns from their middle; text goes on beyond the largest row or column, along all
    three axes at once.

    Args:
        grids: Of each sample.
        text_lens: Text rows of each sample.
        dims: Real dims of a head that turn with frames, rows and columns.
        device: Where the tables are made.
    """
    tables = {grid: _centred_table(grid, dims, device) for grid in dict.fromkeys(grids)}
    image = torch.cat([tables[grid] for grid in grids])
    starts = [max(rows // 2, columns // 2) for _, rows, columns in grids]
    places = [torch.arange(start, start + length) for start, length in zip(starts, text_lens, strict=True)]
    text = _turns(to_device(torch.cat(places).double(), device), torch.cat([_frequencies(dim, device) for dim in dims]))
    return image, text


def _centred_table(grid: Grid, dims: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """complex64 [F*Y*X, hd / 2]: an axis of 5 rows counts from -3 to 1, as Qwen-Image does."""
    frames, *sides = grid
    return _axis_turns([range(frames), *(range(-(side - side // 2), side // 2) for side in sides)], dims, device)


def _axis_turns(places: Sequence[range], dims: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """complex64 [F*Y*X, hd / 2] of tokens at all combinations of the axes' places, in row-major order."""
    sizes, turns = [len(axis) for axis in places], []
    for number, (axis, dim) in enumerate(zip(places, dims, strict=True)):
        positions = torch.arange(axis.start, axis.stop, dtype=torch.float64, device=device)
        view = [1, 1, 1, dim // 2]
        view[number] = len(axis)
        turns.append(_turns(positions, _frequencies(dim, device)).view(view).expand(*sizes, dim // 2))
    return torch.cat(turns, dim=-1).flatten(0, 2)


def _frequencies(dim: int, device: torch.device) -> torch.Tensor:
    return THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def _turns(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """complex64 [positions, frequencies]; angles are float64 until their cosine and sine are rounded once."""
    angles = positions.outer(frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
