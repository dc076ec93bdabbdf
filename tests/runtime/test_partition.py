import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom import UserError
from cubeloom.models import LlamaConfig, build
from cubeloom.parallel import initial_values
from cubeloom.pipeline.runtime.measure import measured_costs
from cubeloom.pipeline.runtime.partition import partition


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


def test_measured_costs_tell_a_heavy_piece_from_a_light_one() -> None:
    """No times are compared, only that the pieces were run in order: a block that sleeps costs at least its sleep."""
    with torch.device("meta"):
        model = build(LlamaConfig(vocab=32, positions=16, hidden=16, layers=3, heads=2, kv_heads=2, mlp_hidden=32))
    model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(0.2))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    fill = initial_values(model, 0, torch.float32)
    costs = measured_costs(model, fill, {"tokens": tokens, "targets": tokens}, torch.device("cpu"), repeats=1)
    assert len(costs) == len(model.pieces())
    assert max(range(len(costs)), key=costs.__getitem__) == 2  # the embedding, a block, the block that sleeps
    assert partition(costs, 3)[1] == range(2, 3)
    assert all(parameter.is_meta for parameter in model.parameters())
