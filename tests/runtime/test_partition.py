import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom import UserError
from cubeloom.runtime.partition import partition


def test_the_most_costly_stage_costs_least() -> None:
    assert partition([1, 1, 1, 1, 4], 2) == [range(4), range(4, 5)]
    assert partition([5, 1, 1, 1], 3) == [range(1), range(1, 2), range(2, 4)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_no_other_cut_is_better(costs: list[int], stages: int) -> None:
    from itertools import combinations, pairwise

    if stages > len(costs):
        with pytest.raises(UserError, match="at most"):
            partition(costs, stages)
        return
    chosen = partition(costs, stages)
    assert [piece for stage in chosen for piece in stage] == list(range(len(costs)))
    worst = max(sum(costs[piece] for piece in stage) for stage in chosen)
    for cuts in combinations(range(1, len(costs)), stages - 1):
        ends = [0, *cuts, len(costs)]
        assert worst <= max(sum(costs[a:b]) for a, b in pairwise(ends))
