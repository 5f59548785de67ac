"""Angles of the rotary position embedding over latent frames, rows and columns (Wan 2.1).

Legend: `N` tokens of all samples side by side, `hd` head dim, `F`, `Y`, `X` tokens along each axis.
"""

import torch

from adaptiveload.models.packing import Grid

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
    turns = []
    for axis, (size, dim) in enumerate(zip(grid, axis_dims(head_dim), strict=True)):
        frequencies = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        angles = torch.arange(size, dtype=torch.float64, device=device).outer(frequencies)  # [size, dim / 2]
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        view = [1, 1, 1, dim // 2]
        view[axis] = size
        turns.append(turn.view(view).expand(*grid, dim // 2))
    return torch.cat(turns, dim=-1).flatten(0, 2)
