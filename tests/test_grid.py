import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom import Grid, UserError
from cubeloom.grid import AXES, grids

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
