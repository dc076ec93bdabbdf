"""Each wrong use of the functions for any model gives one error, that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import cubeloom
from cubeloom import Grid, Network, UserError
from cubeloom.launch import RankPool
from cubeloom.models.example import example_of
from cubeloom.parallel.traced import trace

from .parallelized import batches, build, loss_of

EXAMPLE = {"x": torch.zeros(2, 4, 8)}


class Pair(nn.Module):
    """Two linears, and something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def between(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x))).square().mean()


class Dropping(Pair):
    def between(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.1, self.training)


class Drawing(Pair):
    """Numbers that depend on nothing but chance."""

    def between(self, x: Tensor) -> Tensor:
        return torch.where(torch.rand(x.shape[0], 1, 1) < 0.5, x, 0.0)


class Deciding(Pair):
    def between(self, x: Tensor) -> Tensor:
        return x if torch.rand([]) < 0.5 else x.relu()


class Never(Pair):
    """A probability of 0, as models have it that may leave layers out."""

    def between(self, x: Tensor) -> Tensor:
        return x.relu() if torch.rand([]) < 0.0 else x


class Looking(Pair):
    def between(self, x: Tensor) -> Tensor:
        return x.relu() if x.sum() > 0 else x


class Mixing(Pair):
    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Summing(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).square().sum()


class Images(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.between_them = nn.LSTM(16, 16)

    def between(self, x: Tensor) -> Tensor:
        found: Tensor = self.between_them(x)[0]
        return found


@pytest.mark.parametrize(
    "model, grid, said",
    [
        (
            Dropping(),
            "x=2",
            r"test_wrong_use.py:\d+: dropout draws random numbers, .* set the model's dropout to 0, or",
        ),
        (Dropping(), "z=2", "dropout draws random numbers"),
        (
            Looking(),
            "x=2",
            r"test_wrong_use.py:\d+: bool asks for values of a tensor, which the model is traced without",
        ),
        (Mixing(), "z=2", r"Mixing on z=2: data and z cut samples, and this model .* mean over dimension 0 of"),
        (
            Summing(),
            "data=2",
            r"something else of some samples than of all: .*test_wrong_use.py:\d+: sum over dimension 0",
        ),
        (Drawing(), "x=2", "rand draws random numbers"),
        (Deciding(), "x=2", "rand draws random numbers"),
        (
            Recurrent(),
            "x=2",
            r"between_them \(LSTM\) holds its parameters in _flat_weights too, where they cannot be cut",
        ),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else None,
)
def test_models_that_would_compute_something_else(model: nn.Module, grid: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        trace(model, Grid.parse(grid), EXAMPLE)


def test_a_chance_of_nothing_is_no_chance() -> None:
    assert trace(Never(), Grid.parse("x=2"), EXAMPLE).cut_share > 0.9


def test_batch_norm_in_evaluation_is_cut() -> None:
    assert trace(Images().eval(), Grid.parse("z=2,y=2"), EXAMPLE).cut_share > 0.5


def test_axes_and_ranks() -> None:
    with pytest.raises(UserError, match="init has no axis 'dat'; did you mean 'data'"):
        cubeloom.init(dat=2)
    with pytest.raises(UserError, match="x=2 needs 2 ranks, and this is a single process: start it with `torchrun"):
        cubeloom.init(x=2)


def test_a_forward_that_takes_something_else() -> None:
    class Own(Pair):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features)

    with pytest.raises(UserError, match=r"Own\.forward takes features, of which no example is known: pass `example`"):
        example_of(Own())


def changed() -> str:
    model = build("nano")
    cubeloom.parallelize(model, Network(Grid(y=2)))
    (batch,) = batches("nano", 1)
    loss = loss_of(model, batch)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(2)
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    return str(error.value)


def test_parameters_that_change_between_forward_and_backward(ranks: RankPool) -> None:
    for said in ranks.run(2, changed):
        assert "was changed between a forward and its backward" in said
        assert "call backward before optimizer.step" in said


def meshes() -> list[str]:
    said = []

    def ask(mesh: Any) -> None:
        with pytest.raises(UserError) as error:
            cubeloom.parallelize(Pair(), mesh, example=EXAMPLE)
        said.append(str(error.value))

    ask(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    ask(init_device_mesh("cpu", (2,)))
    ask(Network(Grid(pipe=2)))
    return said


def test_other_meshes(ranks: RankPool) -> None:
    for tp, unnamed, pipe in ranks.run(2, meshes):
        assert tp == "this DeviceMesh has dimensions ('tp',); they must be of pipe, data, z, y, x"
        assert "dimensions without names" in unnamed
        assert pipe == "the grid pipe=2 has pipe=2: use cubeloom.pipeline"


def compiled() -> str:
    model = build("nano")
    cubeloom.parallelize(model, Network(Grid(y=2)))
    (batch,) = batches("nano", 1)
    with pytest.raises(UserError) as error:
        torch.compile(model, backend="eager")(**batch)
    return str(error.value)


@pytest.mark.slow
def test_a_model_that_is_compiled_whole(ranks: RankPool) -> None:
    for said in ranks.run(2, compiled):
        assert said.startswith("torch.compile cannot trace communication") and said.endswith("between collectives")
        assert "cubeloom.parallelize(model, mesh, compile=True)" in said
