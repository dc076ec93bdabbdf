"""What the other layers of models on tokens communicate, and their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cubeloom.plan.closed.linear import replicas, weight
from cubeloom.plan.closed.moves import Move, Parameter
from cubeloom.plan.closed.settings import Settings
from cubeloom.plan.model.layers import Embedding, FirstToken, Loss, Norm, Table, Whole

Tokens = Norm | Embedding | Table | Loss | FirstToken | Whole


def moves(layer: Tokens, s: Settings) -> Iterator[Move]:
    match layer:
        case Norm():
            yield from _norm(layer, s)
        case Embedding():
            yield from _embedding(layer, s)
        case Table():
            yield from _table(layer, s)
        case Loss():
            yield from _loss(layer, s)
        case FirstToken():
            size = s.samples_of * layer.features * s.item
            yield Move("F", "all_reduce", ("y",), size / s.x * s.sharded)
            yield Move("F", "all_gather", ("x",), size)


def parameters(layer: Tokens, s: Settings) -> Iterator[Parameter]:
    match layer:
        case Norm():
            for kind in ("weight", "bias") if layer.bias else ("weight",):
                yield from replicas(f"{layer.name}.{kind}", layer.features / s.x, "y", s.sharded | layer.always)
        case Embedding():
            numbers = layer.entries * layer.features / s.size("x", "y")
            yield from weight(layer.name, numbers, layer.entries / s.size("y"), s)
        case Table():
            local, sharded = layer.entries * layer.features / s.x, _fits(layer, s)
            own = layer.entries / s.size("y", "z")
            yield Parameter(f"{layer.name}.weight", local / s.size("y", "z"), ("data",), sharded, own)
            for each in replicas(f"{layer.name}.weight", local, "y", s.sharded, layer.entries):
                yield replace(each, exists=each.exists * (1 - sharded))
        case Whole():
            yield Parameter(f"{layer.name}.weight", layer.k * layer.n, ("data", "z"), rows=layer.n)
            if layer.bias:
                yield Parameter(f"{layer.name}.bias", layer.n, ("data", "z"), rows=layer.n)


def _norm(layer: Norm, s: Settings) -> Iterator[Move]:
    row = s.rows() / s.further("y", layer.always) * s.statistic
    if layer.centred:
        yield Move("F", "all_gather", ("x",), 2 * s.x * row)  # mean and spread of each part
        yield Move("I", "all_reduce", ("x",), 2 * row)
    else:
        yield Move("F", "all_reduce", ("x",), row)
        yield Move("I", "all_reduce", ("x",), row)


def _embedding(layer: Embedding, s: Settings) -> Iterator[Move]:
    rows = s.rows() * layer.features / s.x * s.item
    yield Move("F", "reduce_scatter", ("y",), rows * s.sharded)
    yield Move("W", "all_gather", ("y",), rows * s.sharded)
    yield Move("F", "all_reduce", ("y",), rows * (1 - s.sharded))
    table = layer.entries * layer.features / s.size("x", "y") * s.weights_cut
    yield Move("F", "all_gather", ("z",), table * s.item, of_weight=True)
    yield Move("W", "reduce_scatter", ("z",), table * s.gradient, of_weight=True)


def _fits(layer: Table, s: Settings) -> Any:
    """A table too small for y and z is replicated along them."""
    return layer.entries % s.size("y", "z") == 0


def _table(layer: Table, s: Settings) -> Iterator[Move]:
    whole = layer.entries * layer.features / s.x * _fits(layer, s)
    yield Move("F", "all_gather", ("y", "z"), whole * s.item, of_weight=True)
    yield Move("W", "reduce_scatter", ("y", "z"), whole * s.gradient * s.sharded, of_weight=True)
    yield Move("W", "reduce_scatter", ("z",), whole * s.gradient / s.y * (1 - s.sharded), of_weight=True)


def _loss(layer: Loss, s: Settings) -> Iterator[Move]:
    two = 2 * s.statistic  # the sum and the count of a mean
    if layer.whole:
        yield Move("F", "all_reduce", ("data", "z"), two)
        return
    row = s.rows() / s.x * s.statistic
    yield Move("F", "all_reduce", ("y",), row)  # the largest
    yield Move("F", "all_reduce", ("y",), (3 if layer.smoothing else 2) * row)
    yield Move("F", "all_reduce", ("data", "z", "x"), two)
