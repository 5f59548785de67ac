"""Rotary embedding against a float64 matrix of plain rotations, and its defining properties."""

import math

import pytest
import torch

from adaptiveload.kernels import qk_reference
from adaptiveload.models.rope import axis_dims, rotary_table


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return qk_reference.rotate(x, torch.view_as_real(table))


@pytest.mark.parametrize(
    ("head_dim", "dims"), [(128, (44, 42, 42)), (64, (24, 20, 20)), (24, (8, 8, 8)), (16, (8, 4, 4))]
)
def test_axis_dims(head_dim, dims):
    assert axis_dims(head_dim) == dims


def test_every_pair_turns_by_position_times_frequency():
    grid, head_dim = (2, 3, 4), 24
    x = torch.randn(24, 2, head_dim, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rotary_table((grid,), head_dim, torch.device("cpu")))
    for token in range(24):
        position = (token // 12, token // 4 % 3, token % 4)
        pair = 0
        for axis, dim in enumerate(axis_dims(head_dim)):
            for index in range(dim // 2):
                angle = position[axis] * 10_000 ** (-2 * index / dim)
                first, second = x[token, :, 2 * pair].double(), x[token, :, 2 * pair + 1].double()
                expected = torch.stack(
                    [
                        first * math.cos(angle) - second * math.sin(angle),
                        first * math.sin(angle) + second * math.cos(angle),
                    ],
                    dim=-1,
                )
                actual = turned[token, :, 2 * pair : 2 * pair + 2].double()
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)  # float32 of numbers near 1
                pair += 1


def test_each_sample_starts_at_the_origin():
    grids = ((1, 2, 2), (2, 1, 2), (1, 2, 2))
    table = rotary_table(grids, 24, torch.device("cpu"))
    assert table.shape == (12, 12)
    assert table.dtype == torch.complex64
    for first in (0, 4, 8):
        assert torch.equal(table[first], torch.ones(12, dtype=torch.complex64))
    assert torch.equal(table[:4], table[8:])
    assert not torch.equal(table[:4], table[4:8])  # equal S, another shape


def test_rotation_keeps_norms_and_depends_on_distance_alone():
    table = rotary_table(((1, 1, 40),), 128, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 128, generator=generator).expand(40, 1, 128) for _ in range(2))
    turned_query, turned_key = rotate(query, table), rotate(key, table)
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1), rtol=1e-6, atol=0)
    products = turned_query[:, 0] @ turned_key[:, 0].T
    for distance in (0, 7, -11):
        diagonal = products.diagonal(distance)
        # Sums of 128 float32 products of size 1, about 1e-6 each.
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)


def test_positions_up_to_the_table_are_exact_to_fp32():
    """The last of 1,024 positions: float32 angles would be off by 6e-5."""
    table = rotary_table(((1, 1, 1024),), 128, torch.device("cpu"))
    frequencies = [10_000 ** (-2 * index / 42) for index in range(21)]
    expected = torch.tensor([complex(math.cos(1023 * f), math.sin(1023 * f)) for f in frequencies])
    torch.testing.assert_close(table[1023, 43:], expected, rtol=0, atol=2e-7)  # two float32 ulps
