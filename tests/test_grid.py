from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom import Grid, UserError
from cubeloom.base.grid import AXES, grids

sizes = st.integers(min_value=1, max_value=3)
any_grid = st.builds(
    Grid, pipe=sizes, data=sizes, z=sizes, y=sizes, x=sizes, placement=st.permutations(AXES).map(tuple)
)


def test_the_last_axis_of_the_placement_is_innermost() -> None:
    grid = Grid(z=2, x=2)
    assert [(grid.coordinates(rank)["z"], grid.coordinates(rank)["x"]) for rank in range(4)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    turned = Grid(z=2, x=2, placement=("pipe", "data", "x", "y", "z"))
    assert turned.line(0, ("z",)) == [0, 1]
    assert turned.line(0, ("x",)) == [0, 2]


@settings(max_examples=50, deadline=None)
@given(any_grid)
def test_rank_and_coordinates_are_inverse(grid: Grid) -> None:
    assert [grid.rank(grid.coordinates(rank)) for rank in range(grid.world)] == list(range(grid.world))


@settings(max_examples=50, deadline=None)
@given(any_grid, st.sampled_from(AXES), st.sampled_from(AXES))
def test_the_lines_along_any_axes_partition_the_ranks(grid: Grid, first: str, second: str) -> None:
    axes = (first,) if first == second else (first, second)
    lines = {tuple(sorted(grid.line(rank, axes))) for rank in range(grid.world)}
    assert sorted(rank for line in lines for rank in line) == list(range(grid.world))


def test_a_grid_reads_back() -> None:
    assert Grid.parse("x=2, y=3,data=4") == Grid(x=2, y=3, data=4)
    assert Grid.parse(str(Grid(pipe=2, z=3))) == Grid(pipe=2, z=3)
    assert Grid.parse("") == Grid()


@pytest.mark.parametrize("text", ["w=2", "x=0", "x=two", "x", "x=2,x=3", "x=-1", "x=2.5"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        Grid.parse(text)


def test_all_grids_of_eight_devices() -> None:
    found = list(grids(8, ("z", "y", "x")))
    assert len(found) == len(set(found)) == 10
    assert all(grid.world == 8 for grid in found)


def test_no_grid_has_more_ranks_than_can_be_looked_at() -> None:
    assert Grid(data=100_000).world == 100_000
    with pytest.raises(UserError, match="has 1,000,000,000 ranks: at most 262,144"):
        Grid(x=10**9)


@pytest.mark.parametrize("size", [2.5, 2.0, True, False, "2", 0, -1, None, np.float64(2), np.int64(0)])
def test_a_size_is_a_whole_number_from_1_up(size: Any) -> None:
    with pytest.raises(UserError, match="grid axis x must be a whole number from 1 up, got"):
        Grid(x=size)


def test_sizes_of_numpy_are_whole_numbers_too() -> None:
    size: Any = np.int64(2)
    assert Grid(x=size) == Grid(x=2) and type(Grid(x=size).x) is int


def test_no_sample_is_dropped() -> None:
    grid = Grid(data=2, z=2)
    parts = [grid.share({"data": data, "z": z}, 8) for data in range(2) for z in range(2)]
    assert [list(range(8))[part] for part in parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(UserError, match=r"5 samples .* data=2 and z=2, .* multiple of 4: the nearest are 4 and 8"):
        grid.share({"data": 0, "z": 0}, 5)
    with pytest.raises(UserError, match="the nearest is 4"):
        grid.share({"data": 0, "z": 0}, 3)
