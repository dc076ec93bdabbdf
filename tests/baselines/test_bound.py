"""The lower bound of Al Daas et al., and the table of what the best grid and the cube attain of it."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom.tools.baselines import best_grid, lower_bound, matmul_grids, moved_words, regime

SIZE = 8192


@pytest.mark.parametrize(
    ("shape", "ranks", "dims", "best", "best_ratio", "cube_ratio"),
    [
        ((SIZE, SIZE, SIZE), 8, 3, (2, 2, 2), 1.00, 1.00),
        ((SIZE, SIZE, SIZE), 64, 3, (4, 4, 4), 1.00, 1.00),
        ((SIZE, SIZE, SIZE), 512, 3, (8, 8, 8), 1.00, 1.00),
        ((4096, 12288, 49152), 8, 2, (1, 1, 8), 1.11, 2.69),
        ((4096, 12288, 49152), 64, 3, (1, 4, 16), 1.01, 1.92),
        ((65536, 4096, 16384), 64, 2, (16, 1, 4), 1.00, 2.33),
        ((1048576, SIZE, SIZE), 8, 1, (8, 1, 1), 1.00, 36.7),
        ((1048576, SIZE, SIZE), 64, 1, (64, 1, 1), 1.00, 12.2),
        ((512, SIZE, SIZE), 64, 2, (1, 8, 8), 1.00, 3.86),
        ((2048, 4096, 4096), 64, 3, (2, 4, 8), 1.08, 1.08),
    ],
)
def test_the_table_of_what_grids_attain(
    shape: tuple[int, int, int],
    ranks: int,
    dims: int,
    best: tuple[int, int, int],
    best_ratio: float,
    cube_ratio: float,
) -> None:
    """`reference/cube.md` 4.3, to its own number of digits."""
    bound = lower_bound(*shape, ranks)
    q = round(ranks ** (1 / 3))
    assert regime(*shape, ranks) == dims
    assert best_grid(*shape, ranks) == best
    assert float(moved_words(*shape, best)) / bound == pytest.approx(best_ratio, abs=0.005)
    assert float(moved_words(*shape, (q, q, q))) / bound == pytest.approx(
        cube_ratio, abs=0.05 if cube_ratio > 9 else 0.005
    )


sizes = st.integers(1, 64)


@settings(deadline=None)
@given(sizes, sizes, sizes, st.integers(1, 64))
def test_no_grid_moves_less_than_the_bound(m: int, k: int, n: int, ranks: int) -> None:
    bound = lower_bound(m, k, n, ranks)
    words = [float(moved_words(m, k, n, grid)) for grid in matmul_grids(ranks)]
    # Where some grid cuts a dimension into more parts than it has, the words are a formula's and still above the bound.
    assert min(words) >= bound - 1e-9 * max(1.0, abs(bound))


@settings(deadline=None)
@given(sizes, st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_an_ideal_grid_attains_the_bound(block: int, gm: int, gk: int, gn: int) -> None:
    """Cubic blocks: grid proportional to the matrices' dimensions."""
    shape, grid = (block * gm, block * gk, block * gn), (gm, gk, gn)
    assert float(moved_words(*shape, grid)) == pytest.approx(lower_bound(*shape, prod(grid)), abs=1e-6)


def test_one_rank_receives_nothing() -> None:
    assert lower_bound(3, 5, 7, 1) == 0
    assert moved_words(3, 5, 7, (1, 1, 1)) == Fraction(0)
