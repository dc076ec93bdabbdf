"""A head computed together with its loss, in chunks, is the head and then the loss: loss, gradients, weights and bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from compiling import BACKEND
from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, build, config, cut_of
from cubeloom.parallel import Batch, ParallelConfig, ShardingPolicy, apply, initial_values, resolve
from cubeloom.parallel.layers.head import CubeHead, chunk_rows
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.specs import LinearSpec
from grids import rest_is_long

TINY = cast(GPTConfig, config("gpt-tiny"))
BATCH = Batch(4, 12)

pytestmark = pytest.mark.timeout(120)


def head_fits(grid: Grid, rest: ShardingPolicy, size: GPTConfig = TINY) -> bool:
    with torch.device("meta"):
        model = build(size)
    specs = resolve(model, cut_of(model), grid, rest, Batch(8, 24))
    head = next(spec for spec in specs if isinstance(spec, LinearSpec) and spec.name == "head")
    return bool(head.fits_loss(ParallelConfig.exact(grid, rest, Batch(8, 24), 8)))


@pytest.mark.parametrize(
    ("grid", "rest", "fits"),
    [
        ("x=1", ShardingPolicy(), True),
        ("y=2", ShardingPolicy(), True),
        ("data=2,y=2", ShardingPolicy(), True),
        ("x=2", ShardingPolicy(), False),  # logits are summed over x
        ("z=2", ShardingPolicy(), False),  # the weight is gathered for the backward
        ("z=2", ShardingPolicy(weights="replicated"), True),
        ("y=2", ShardingPolicy(inputs="regathered"), False),  # the input is gathered for the backward
        ("y=2", ShardingPolicy(activations="replicated", inputs="regathered"), True),
    ],
)
def test_where_head_and_loss_are_one(grid: str, rest: ShardingPolicy, fits: bool) -> None:
    assert head_fits(Grid.parse(grid), rest) is fits


def test_chunks_are_halved_until_they_are_small_enough() -> None:
    assert chunk_rows(16384, 100, 10**9) == 16384
    assert chunk_rows(16384, 50304 * 2, 2**29) == 4096
    assert chunk_rows(10, 100, 300) == 3
    assert chunk_rows(10, 100, 1) == 1


Found = tuple[list[Tensor], float]


def train(size: GPTConfig, grid: Grid, rest: ShardingPolicy, fused: bool, chunk: int, compiled: bool = False) -> Found:
    """The loss and the gradients of this rank, and the bytes it received; ignored targets and a second backward among it."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(size)
    state = apply(model, cut_of(model), network, BATCH, initial_values(model, 0, torch.float64), rest)
    head = model.head
    assert isinstance(head, CubeHead)
    head.chunk_bytes = chunk
    if compiled:
        head.compile_local(BACKEND)
    if fused:
        head.logits = Mock(side_effect=AssertionError("logits are computed"))  # type: ignore[method-assign]
    else:
        head.forward = head.logits  # type: ignore[method-assign]
    torch.manual_seed(0)
    tokens = torch.randint(size.vocab, (BATCH.samples, BATCH.sequence))
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(tokens.shape) < 0.2, -100)
    found = []
    with network.recording() as ledger:
        for tokens_part, targets_part in ((tokens, targets), (targets.clamp(min=0), tokens)):
            loss_now = model(network.share(tokens_part), network.share(targets_part))
            with state.gradients.defer_weight_grads() as noted:
                loss_now.backward()
            state.gradients.run_deferred(noted)
            found.append(loss_now.detach())
        state.gradients.reduce()
    found += [local_of(cast(Tensor, parameter.grad)).clone() for parameter in model.parameters()]
    return found, sum(float(entry.received) for entry in ledger.entries)


def alike(one: list[Found], other: list[Found]) -> None:
    for (mine, moved), (theirs, moved_too) in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        assert moved == moved_too


@pytest.mark.parametrize(
    ("grid", "smoothing", "tied"),
    rest_is_long(
        [(grid, *how) for grid in ("x=1", "y=2", "y=4", "data=2,y=2") for how in ((0.0, True), (0.2, False))],
        [("x=1", 0.2, False), ("y=2", 0.0, True), ("y=4", 0.2, False), ("data=2,y=2", 0.0, True)],
    ),
)
def test_as_head_and_then_loss(ranks: RankPool, grid: str, smoothing: float, tied: bool) -> None:
    size, on = replace(TINY, label_smoothing=smoothing, tied=tied), Grid.parse(grid)
    small = 7 * size.vocab * 8  # several chunks, the last one shorter
    one = ranks.run(on.world, train, size, on, ShardingPolicy(), True, small)
    other = ranks.run(on.world, train, size, on, ShardingPolicy(), False, small)
    alike(one, other)


@pytest.mark.parametrize("grid", ["x=1", "y=2"])
def test_compiled(ranks: RankPool, grid: str) -> None:
    on = Grid.parse(grid)
    one = ranks.run(on.world, train, TINY, on, ShardingPolicy(), True, 7 * TINY.vocab * 8, True)
    other = ranks.run(on.world, train, TINY, on, ShardingPolicy(), True, 2**28)
    alike(one, other)


@pytest.mark.parametrize("grid", ["x=1", "y=2"])
def test_logits_that_something_else_uses_are_computed(ranks: RankPool, grid: str) -> None:
    """A model that scales them before the loss, or returns them beside it, gets the numbers of the layer apart."""
    on = Grid.parse(grid)
    for deferred, apart in zip(
        ranks.run(on.world, scaled, on, True), ranks.run(on.world, scaled, on, False), strict=True
    ):
        for one, other in zip(deferred, apart, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def scaled(grid: Grid, deferred: bool) -> list[Tensor]:
    network = Network(grid)
    with torch.device("meta"):
        model = build(TINY)
    apply(model, cut_of(model), network, BATCH, initial_values(model, 0, torch.float64))
    head = model.head
    assert isinstance(head, CubeHead)
    if not deferred:
        head.forward = head.logits  # type: ignore[method-assign]
    tokens = torch.arange(BATCH.samples * BATCH.sequence).view(BATCH.samples, -1) % TINY.vocab
    logits = model(tokens)
    assert logits.shape == (tokens.numel(), TINY.vocab // grid.y)
    loss = model.loss(logits / 2, tokens.flatten()) + model.loss(logits, tokens.flatten())
    loss.backward()
    gradients = [local_of(cast(Tensor, parameter.grad)).clone() for parameter in model.parameters()]
    return [loss.detach(), (logits * 1.0).detach(), *gradients]


def test_nobody_asks_for_gradients(ranks: RankPool) -> None:
    with_, without = ranks.run(1, evaluate)[0]
    torch.testing.assert_close(with_, without, rtol=0, atol=1e-12)


def evaluate() -> tuple[Tensor, Tensor]:
    network = Network(Grid())
    with torch.device("meta"):
        model = build(TINY)
    apply(model, cut_of(model), network, BATCH, initial_values(model, 0, torch.float64))
    tokens = torch.arange(BATCH.samples * BATCH.sequence).view(BATCH.samples, -1) % TINY.vocab
    with_ = model(tokens, tokens).detach()
    with torch.no_grad():
        return with_, model(tokens, tokens)
