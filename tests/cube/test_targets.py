"""Targets that are ignored, up to all of a rank, a strand, a micro-batch or a batch; ids and targets out of range."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cubeloom
from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, build, cut_of
from cubeloom.parallel import Batch, apply, initial_values, materialise
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.weave import Weave
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline

GPT = GPTConfig(vocab=24, positions=8, hidden=16, layers=2, heads=2)
TOKENS = torch.arange(4 * 8).view(4, 8) % 24
BATCH = Batch(4, 8)

Norms = dict[str, float]  # of gradients


def built() -> nn.Module:
    with torch.device("meta"):
        return build(GPT)


def values(model: nn.Module) -> Fill:
    return initial_values(model, 0, torch.float64)  # type: ignore[arg-type]


def targets(ignored: int) -> Tensor:
    """Those of the last samples are ignored."""
    made = TOKENS.roll(-1, 1).clone()
    made[4 - ignored :] = -100
    return made


def serial(ignored: int) -> tuple[float, Norms]:
    model = built()
    materialise(model, values(model))
    loss = model(TOKENS, targets(ignored))
    loss.backward()
    return loss.item(), {name: each.grad.norm().item() for name, each in model.named_parameters()}  # type: ignore[union-attr]


def norms(model: nn.Module) -> Norms:
    """Of whole gradients, from each rank's blocks."""
    return {name: each.grad.full_tensor().norm().item() for name, each in model.named_parameters()}  # type: ignore[union-attr]


def cut(grid: Grid, ignored: int, ways: int) -> tuple[float, Norms]:
    model, network = built(), Network(grid)
    apply(model, cut_of(model), network, Batch(4, 8), values(model))
    loss = Weave(model, ways)(network.share(TOKENS), network.share(targets(ignored)))
    loss.backward()
    return loss.item(), norms(model)


def alike(found: tuple[float, Norms], wanted: tuple[float, Norms]) -> None:
    assert found[0] == pytest.approx(wanted[0], abs=1e-12, nan_ok=True)
    assert found[1] == pytest.approx(wanted[1], abs=1e-12)


@pytest.mark.parametrize("ignored", [2, 4])
@pytest.mark.parametrize(("grid", "ways"), [("data=2", 1), ("z=2", 1), ("y=2", 2), ("x=2", 2)])
def test_a_rank_or_strand_without_targets(grid: str, ways: int, ignored: int, ranks: RankPool) -> None:
    """Of a batch without any the loss is NaN and gradients are 0, as torch has it."""
    where = Grid.parse(grid)
    wanted = serial(ignored)
    assert math.isnan(wanted[0]) == (ignored == 4) and not any(map(math.isnan, wanted[1].values()))
    for found in ranks.run(where.world, cut, where, ignored, ways):
        alike(found, wanted)


def piped(grid: Grid, schedule: str, ignored: int) -> tuple[float, Norms]:
    model = built()
    made = Pipeline(
        model,
        cut_of(model),
        Network(grid),
        BATCH,
        values(model),
        generate(schedule, grid.pipe, 4),
    )
    loss = made.step({"tokens": TOKENS, "targets": targets(ignored)}, 0)
    return loss, {name: local_of(each.grad).norm().item() for name, each in made.parameters.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("ignored", [1, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "chimera"])
def test_a_microbatch_without_targets(schedule: str, ignored: int, ranks: RankPool) -> None:
    loss, wanted = serial(ignored)
    for found, gradients in ranks.run(2, piped, Grid(pipe=2), schedule, ignored):
        alike((found, gradients), (loss, {name: wanted[name] for name in gradients}))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.down(self.up(x).relu()), targets)


def parallelized(grid: Grid, ignored: int) -> tuple[float, Norms, float, Norms]:
    torch.manual_seed(0)
    model, x, y = Plain().double(), torch.randn(4, 4, dtype=torch.float64), torch.tensor([1, 2, 3, 4])
    y[4 - ignored :] = -100
    expected = model(x, y)
    expected.backward()
    wanted = {name: each.grad.norm().item() for name, each in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    network = Network(grid)
    mine = {"x": network.share(x), "targets": network.share(y)}
    report = cubeloom.parallelize(model, network, example=mine)
    with network.recording() as ledger:
        loss = model(**mine)
        loss.backward()
    assert report.volume() == ledger.by_axis()
    return loss.item(), norms(model), expected.item(), wanted


@pytest.mark.parametrize("ignored", [1, 2, 4])
def test_targets_of_a_model_that_nobody_cut_are_counted_over_all_ranks(ignored: int, ranks: RankPool) -> None:
    for loss, gradients, expected, wanted in ranks.run(2, parallelized, Grid(data=2), ignored):
        alike((loss, gradients), (expected, wanted))


def out_of_range(grid: Grid, index: int, where: str, fused: bool) -> str:
    model, network = built(), Network(grid)
    apply(model, cut_of(model), network, BATCH, values(model))
    given = {"tokens": TOKENS.clone(), "targets": targets(1)}
    given[where][:, 3] = index  # on every rank of data and z
    mine = {name: network.share(each) for name, each in given.items()}
    try:
        if fused:
            model(**mine)
        else:
            model.loss(model(mine["tokens"]), mine["targets"].flatten())  # type: ignore[operator]
    except IndexError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("grid", ["x=2", "y=2", "data=2,y=2"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("index", [24, -1])
def test_targets_out_of_range_are_refused_on_every_grid(grid: str, fused: bool, index: int, ranks: RankPool) -> None:
    where = Grid.parse(grid)
    told = f"loss: target {index} is out of range: it must be from 0 to 23, or -100 for one that is ignored"
    assert ranks.run(where.world, out_of_range, where, index, "targets", fused) == [told] * where.world


@pytest.mark.parametrize("grid", ["x=2", "y=2", "y=2,z=2"])
@pytest.mark.parametrize("index", [24, -1])
def test_token_ids_out_of_range_are_refused_on_every_grid(grid: str, index: int, ranks: RankPool) -> None:
    """Where the vocabulary is whole it is torch that says so."""
    where = Grid.parse(grid)
    told = (
        f"embed: token id {index} is out of range: it must be from 0 to 23"
        if where.y > 1
        else "index out of range in self"
    )
    assert ranks.run(where.world, out_of_range, where, index, "tokens", True) == [told] * where.world
