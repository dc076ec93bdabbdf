"""What cannot work is refused before anything starts, with what is legal and what is nearest."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import nn

from cubeloom import Grid, UserError
from cubeloom.models import Config, GPTConfig, build, config, cut_of
from cubeloom.parallel import Batch, Cut, CutError, ShardingPolicy, resolve
from cubeloom.parallel.layers import Contract, Embedding, Expand, Loss, Table
from cubeloom.parallel.resolution import problems, specs_of
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime.build import plan_stages

GPT_TINY = cast(GPTConfig, config("gpt-tiny"))


def refused(model: str | Config, grid: str, batch: Batch | None = None, **rest: str) -> str:
    on = Grid.parse(grid)
    with torch.device("meta"):
        plain = build(config(model) if isinstance(model, str) else model)
    with pytest.raises(CutError) as caught:
        resolve(plain, cut_of(plain), on, ShardingPolicy(**rest), batch or Batch(2 * on.data * on.z, 24))  # type: ignore[arg-type]
    return str(caught.value)


def test_a_grid_that_does_not_divide_the_hidden_size() -> None:
    message = refused("gpt-tiny", "x=5")
    assert "layer embed: features 96 cannot be cut over x=5" in message
    assert "grids that work: x=6" in message


@pytest.mark.parametrize("grid", ["y=2", "z=2", "y=4,z=2", "x=2,y=2"])
def test_any_vocabulary_can_be_cut(grid: str) -> None:
    """GPT-2's own is odd: it is padded."""
    with torch.device("meta"):
        plain = build(config("gpt2"))
    resolve(plain, cut_of(plain), Grid.parse(grid), ShardingPolicy(), Batch(8, 1024))


def test_a_grid_that_does_not_divide_the_heads() -> None:
    message = refused(replace(GPT_TINY, heads=2, hidden=96), "y=4")
    assert "layer blocks.0.attention.qkv: heads 2 cannot be cut over y=4" in message
    assert "grids that work" in message


def test_neither_heads_nor_sequences_suffice() -> None:
    message = refused(replace(GPT_TINY, heads=2), "x=2,y=2", Batch(3, 24))
    assert "heads 2 cannot be cut over x=2·y=2, nor the 3 sequences of one z rank over x=2" in message


def test_a_batch_that_does_not_divide() -> None:
    assert "the batch of 6 samples cannot be cut over data=2·z=2" in refused("gpt-tiny", "data=2,z=2", Batch(6, 24))


def test_rows_that_do_not_divide() -> None:
    assert "rows of one z rank, 46 cannot be cut over y=4" in refused("gpt-tiny", "y=4", Batch(2, 23))
    on = Grid.parse("y=2")
    with torch.device("meta"):
        plain = build(config("gpt-tiny"))
    # Replicated along y, rows need not be cut there.
    resolve(plain, cut_of(plain), on, ShardingPolicy(activations="replicated"), Batch(1, 23))


def test_the_nearest_grids_really_work() -> None:
    message = refused("bert-tiny", "x=5,y=2", Batch(12, 24))
    with torch.device("meta"):
        plain = build(config("bert-tiny"))
    suggestions = message.split("grids that work: ")[1].split("; ")
    assert len(suggestions) == 3
    for suggestion in suggestions:
        resolve(plain, cut_of(plain), Grid.parse(suggestion), ShardingPolicy(), Batch(12, 24))


@pytest.mark.parametrize(
    ("model", "grid", "batch", "batches"),
    [
        ("gpt-tiny", "y=4", Batch(2, 23), [4]),
        ("gpt-tiny", "data=2,z=2", Batch(6, 24), [4, 8]),
        ("gpt-tiny", "y=2,x=3", Batch(7, 5), [6, 12]),
        ("unet-tiny", "x=2,y=2", Batch(7, 1), [6, 8]),
    ],
)
def test_the_nearest_batches_really_work(model: str, grid: str, batch: Batch, batches: list[int]) -> None:
    message = refused(model, grid, batch)
    found = message.split(" that work")[1].partition(": ")[2].split(" samples")[0].split(" or ")
    assert [int(each) for each in found] == batches
    with torch.device("meta"):
        plain = build(config(model))
    on = Grid.parse(grid)
    near = range(batches[0], batches[-1] + 1) if len(batches) > 1 else range(1, batches[0] + 1)
    for samples in near:
        fits = not any(problems(specs_of(plain, cut_of(plain)), on, ShardingPolicy(), replace(batch, samples=samples)))
        assert fits is (samples in batches), samples


def test_a_batch_is_not_to_blame_for_sizes() -> None:
    """What no batch would mend comes first, and no batch is named."""
    message = refused("gpt-tiny", "y=5", Batch(2, 24))
    assert "qkv: output features 288 cannot be cut over y=5" in message and "batch" not in message


def test_a_pipeline_s_nearest_batch_is_that_of_a_step() -> None:
    with torch.device("meta"):
        plain = build(config("gpt-tiny"))
    grid, schedule = Grid(pipe=2, y=4), generate("1f1b", 2, 4)
    with pytest.raises(CutError, match="the nearest batch that works: 16 samples"):
        plan_stages(plain, cut_of(plain), grid, Batch(4, 3), schedule, ShardingPolicy())
    plan_stages(plain, cut_of(plain), grid, Batch(16, 3), schedule, ShardingPolicy())
    with pytest.raises(UserError, match="it must be a multiple of 4: the nearest are 4 and 8"):
        plan_stages(plain, cut_of(plain), grid, Batch(6, 3), schedule, ShardingPolicy())


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Bilinear(8, 8, 8)
        self.dropout = nn.Dropout(0.1)


def resolve_odd(cut: Cut) -> None:
    with torch.device("meta"):
        resolve(Odd(), cut, Grid(x=2), ShardingPolicy(), Batch(2, 2))


def test_a_layer_is_never_left_serial_in_silence() -> None:
    with pytest.raises(CutError, match=r"layer second \(Bilinear\) has parameters but the cut does not say"):
        resolve_odd({"first": Expand()})
    with pytest.raises(CutError, match="layer second is a Bilinear, which the cut cannot take as Contract"):
        resolve_odd({"first": Expand(), "second": Contract()})


@pytest.mark.parametrize(
    ("layer", "cut", "message"),
    [
        (nn.Dropout(0.1), {}, "mask would depend on the grid"),
        (nn.CrossEntropyLoss(), {}, "each rank would take the mean of its own rows"),
        (nn.BatchNorm1d(4, affine=False), {}, "has buffers, which a cut cannot fill"),
        (nn.CrossEntropyLoss(), {"0": Loss(), "lsos": Loss()}, "the cut names 'lsos', but the model has no such layer"),
        (nn.CrossEntropyLoss(reduction="sum"), {"0": Loss()}, "has reduction='sum', which has no form here"),
        (nn.Embedding(4, 4, padding_idx=0), {"0": Embedding()}, "has padding_idx=0, which has no form here"),
        (nn.Embedding(4, 4, max_norm=1.0), {"0": Table()}, "has max_norm=1.0"),
    ],
)
def test_what_would_compute_something_else_is_never_left_as_it_is(layer: nn.Module, cut: Cut, message: str) -> None:
    with pytest.raises(CutError, match=re.escape(message)):
        resolve(nn.Sequential(layer), cut, Grid(x=2), ShardingPolicy(), Batch(2, 2))
