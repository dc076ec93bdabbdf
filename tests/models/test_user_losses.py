"""Losses outside of a model: on every grid they and their gradients are those of the whole batch, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cubeloom
from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, LlamaConfig, cut_of
from cubeloom.models.gpt import GPT
from cubeloom.models.llama import Llama
from cubeloom.parallel import Batch, apply, initial_values, materialise
from grids import rest_is_long

from . import user_losses
from .parallelized import apart, build
from .user_losses import LENGTH, LOSSES, SAMPLES, VOCAB, Given, Head, Scorer, batch_of

CLOSE = 1e-10
GRIDS = ["data=2", "z=2", "x=2", "y=2", "data=2,z=2", "data=2,y=2", "x=2,z=2", "x=2,y=2", "x=2,y=2,z=2"]
Found = dict[str, "float | str"]
Runs = Callable[[nn.Module, Given], Given]


def scored(model: nn.Module, batch: Given) -> Given:
    given: Given = model(batch["tokens"])
    return given


def logits_of(model: nn.Module, batch: Given) -> Given:
    """Of a decoder of ours, which gives a row for each token."""
    logits = model(batch["tokens"]).view(*batch["tokens"].shape, VOCAB)
    return {"logits": logits, "hidden": logits.tanh()}


def differences(model: nn.Module, serial: nn.Module, runs: Runs, mesh: Network, batch: Given) -> Found:
    """Of each loss: how far it and its gradients are off, or why it is refused."""
    found: Found = {}
    for name, loss_of in LOSSES.items():
        serial.zero_grad()
        model.zero_grad()
        whole = batch_of()
        wanted = loss_of(runs(serial, whole), whole)
        wanted.backward()
        try:
            loss = loss_of(runs(model, batch), batch)
            loss.backward()
        except UserError as error:
            found[name] = str(error)
            continue
        found[name] = max(abs(loss.item() - wanted.item()), apart(model, serial, mesh, gradients=True))
    return found


def of_a_traced_model(grid: Grid, ways: int) -> Found:
    torch.manual_seed(0)
    serial, mesh = Scorer().double(), Network(grid)
    model = copy.deepcopy(serial)
    cubeloom.parallelize(model, mesh, ways=ways)
    return differences(model, serial, scored, mesh, mesh.shard(batch_of()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid, ways",
    rest_is_long([*((grid, 1) for grid in GRIDS), ("z=2", 2), ("x=2,y=2", 2)], [("data=2", 1), ("x=2,z=2", 1)]),
)
def test_of_a_traced_model(grid: str, ways: int, ranks: RankPool) -> None:
    where = Grid.parse(grid)
    for found in ranks.run(where.world, of_a_traced_model, where, ways):
        assert {name: each for name, each in found.items() if isinstance(each, str) or each > CLOSE} == {}


def decoder(kind: str) -> nn.Module:
    sizes: dict[str, Any] = {"vocab": VOCAB, "positions": 8, "hidden": 16, "layers": 1, "heads": 4}
    return GPT(GPTConfig(**sizes)) if kind == "gpt" else Llama(LlamaConfig(**sizes, kv_heads=4, mlp_hidden=32))


def of_our_model(grid: Grid, kind: str, way: str) -> Found:
    mesh = Network(grid)
    with torch.device("meta"):
        serial: Any = decoder(kind)
        model: Any = decoder(kind)
    fill = initial_values(model, 0, torch.float64)
    materialise(serial, fill)
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    if way == "apply":
        apply(model, cut_of(model), mesh, Batch(SAMPLES, LENGTH), fill, example=lambda _: {"tokens": tokens})
    else:
        cubeloom.parallelize(model, mesh, fill=fill, batch=(SAMPLES, LENGTH), example={"tokens": tokens})
    return differences(model, serial, logits_of, mesh, mesh.shard(batch_of()))


SHORT = [("gpt", "parallelize", "x=2,y=2"), ("llama", "apply", "z=2")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, way, grid",
    rest_is_long(
        [
            *((kind, "parallelize", grid) for kind in ("gpt", "llama") for grid in GRIDS),
            *((kind, "apply", grid) for kind in ("gpt", "llama") for grid in ("z=2", "data=2,x=2", "data=2,y=2")),
        ],
        SHORT,
    ),
)
def test_of_our_model(kind: str, way: str, grid: str, ranks: RankPool) -> None:
    where = Grid.parse(grid)
    for found in ranks.run(where.world, of_our_model, where, kind, way):
        assert {name: each for name, each in found.items() if isinstance(each, str) or each > CLOSE} == {}


# What a program forgets or cannot have.


def refusal(run: Callable[[], Any]) -> str:
    try:
        run()
    except UserError as error:
        return str(error)
    return ""


class Squared(torch.autograd.Function):
    """An autograd function of a user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def forgotten(grid: Grid) -> dict[str, str]:
    torch.manual_seed(0)
    model, mesh = Scorer().double(), Network(grid)
    cubeloom.parallelize(model, mesh)
    whole, own = batch_of(), mesh.shard(batch_of())
    plain = {name: mesh.share(each) for name, each in whole.items()}

    def by_own_count() -> None:
        loss = user_losses.each_target(model(own["tokens"]), own).sum() / float(plain["mask"].sum())
        loss.backward()

    def with_plain_targets() -> None:
        user_losses.masked_mean(model(own["tokens"]), plain)

    def in_a_function_of_its_own() -> None:
        Squared.apply(model(own["tokens"])["hidden"]).backward()

    def drawn_in_place() -> None:
        model(own["tokens"])["hidden"].uniform_()

    found = {
        name: refusal(lambda loss=loss: loss(model(plain["tokens"]), plain).backward())  # type: ignore[misc]
        for name, loss in LOSSES.items()
        if name not in ("with_metrics", "of_a_mean_inside")  # that counts samples; this is right
    }
    for run in (by_own_count, with_plain_targets, in_a_function_of_its_own, drawn_in_place):
        found[run.__name__] = refusal(run)
    return found


def test_what_is_of_none_of_the_batches_is_refused(ranks: RankPool) -> None:
    for found in ranks.run(2, forgotten, Grid(z=2)):
        assert "user_losses.py" in found.pop("with_plain_targets")
        assert "an autograd function has taken" in found.pop("in_a_function_of_its_own")
        assert "uniform_ changes a tensor of the whole batch" in found.pop("drawn_in_place")
        for name, words in found.items():
            assert "the loss differs between ranks" in words and "mesh.shard(batch)" in words, name


# What loops do beside.


def others(grid: Grid) -> dict[str, float]:
    torch.manual_seed(0)
    serial, head, mesh = Scorer().double(), Head(), Network(grid)
    model, own_head = copy.deepcopy(serial), copy.deepcopy(head)
    cubeloom.parallelize(model, mesh)
    whole, own = batch_of(), mesh.shard(batch_of())
    found: dict[str, float] = {}

    def compare(name: str, loss: Callable[[nn.Module, nn.Module, Given], Tensor]) -> None:
        for each in (serial, model, head, own_head):
            each.zero_grad()
        one, two = loss(serial, head, whole), loss(model, own_head, own)
        one.backward()
        two.backward()
        pairs = zip(head.parameters(), own_head.parameters(), strict=True)
        heads = [(a.grad - b.grad).abs().max().item() for a, b in pairs if a.grad is not None and b.grad is not None]
        found[name] = max(abs(one.item() - two.item()), apart(model, serial, mesh, gradients=True), *heads, 0.0)

    compare("a head that nobody cut", lambda model, head, batch: head(scored(model, batch), batch))
    compare("a penalty", lambda model, _, batch: user_losses.a_sum(scored(model, batch), batch) + penalty(model))
    compare("half of it twice", twice)
    compare("of inputs", of_inputs)
    # Each rank loads its own samples.
    local = mesh.from_local({name: mesh.share(each) for name, each in whole.items()})
    compare("loaded by each", lambda model, _, batch: of_either(model, batch if batch is whole else local))
    gathered = mesh.gather(own)
    found["gathered"] = max((gathered[name] - whole[name]).abs().max().item() for name in ("weights", "tokens"))
    return found


def of_either(model: nn.Module, batch: Given) -> Tensor:
    return user_losses.masked_mean(scored(model, batch), batch)


def penalty(model: nn.Module) -> Tensor:
    weight: Any = model.get_parameter("up.weight")
    squares = weight.square().sum()
    return squares.full_tensor() if hasattr(squares, "full_tensor") else squares


def twice(model: nn.Module, _: nn.Module, batch: Given) -> Tensor:
    """Gradients add up; and a copy of the model has a boundary of its own."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        before = user_losses.masked_mean(scored(other, batch), batch)
    (user_losses.masked_mean(scored(model, batch), batch) / 2).backward()
    return user_losses.masked_mean(scored(model, batch), batch) / 2 + 0 * before


def of_inputs(model: nn.Module, _: nn.Module, batch: Given) -> Tensor:
    """Gradients of what the model gives, as numbers."""
    given = scored(model, batch)
    loss = user_losses.masked_mean(given, batch)
    (slope,) = torch.autograd.grad(loss, given["logits"], retain_graph=True)
    return loss * (1 + slope.abs().sum().item())


@pytest.mark.parametrize("grid", rest_is_long(["data=2", "data=2,z=2", "y=2,z=2"], ["data=2"]))
def test_what_loops_do_beside(grid: str, ranks: RankPool) -> None:
    where = Grid.parse(grid)
    for found in ranks.run(where.world, others, where):
        assert max(found.values()) < CLOSE, found


def generated(grid: Grid) -> bool:
    serial: Any = build("llama").eval()
    model, mesh = copy.deepcopy(serial), Network(grid)
    cubeloom.parallelize(model, mesh)
    tokens = torch.arange(12).view(4, 3) + 5
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    return torch.equal(model.generate(tokens, **options), serial.generate(tokens, **options))


@pytest.mark.slow
def test_tokens_that_all_ranks_have_are_generated_by_all(ranks: RankPool) -> None:
    assert all(ranks.run(2, generated, Grid(data=2)))
