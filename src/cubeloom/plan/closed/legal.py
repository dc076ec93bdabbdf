"""Where the sizes of a model do not divide: the same refusals as `parallel.resolve`, for arrays of decompositions at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cubeloom.plan.closed.settings import Settings
from cubeloom.plan.model import layers as plan

Refusal = tuple[str, Any]  # what cannot be cut, and where


def refusals(model: plan.Model, s: Settings) -> Iterator[Refusal]:
    """`s.samples` are those of one strand of a micro-batch, over the whole grid."""
    yield "batch over data and z", s.samples % (s.data * s.z) != 0
    for kind in model.kinds:
        for layer in kind.layers:
            yield from _layer(layer, s)


def _divides(what: str, size: Any, parts: Any) -> Refusal:
    return what, np.asarray(size % parts != 0)


def _layer(layer: plan.Any, s: Settings) -> Iterator[Refusal]:
    match layer:
        case plan.Linear():
            yield from _linear(layer, s)
        case plan.Norm():
            yield _divides("hidden size over x", layer.features, s.x)
        case plan.Embedding():
            shards = s.size("y") * np.where(s.weights_cut, s.z, 1)
            yield _divides("vocabulary over y and z", layer.entries, shards)
            yield _divides("hidden size over x", layer.features, s.x)
            what, cut = _divides("rows of a micro-batch over x or y", s.rows(), s.y)
            yield what, cut & s.sharded
        case plan.Table():
            yield _divides("hidden size over x", layer.features, s.x)
        case plan.Edge() | plan.ImageNorm() | plan.Concat() | plan.SquaredLoss() | plan.Share():
            yield from _image(layer, s)


def _linear(layer: plan.Linear, s: Settings) -> Iterator[Refusal]:
    k, n = s.size(layer.k_axis), s.size(layer.n_axis)
    shards = np.where(s.weights_cut, s.z, 1)
    first, second = (shards, 1) if layer.transposed else (1, shards)
    yield _divides("features of a linear over x, y and z", layer.k, k * first)
    yield _divides("features of a linear over x, y and z", layer.n, n * second)
    if layer.turn:
        yield _divides("features of a linear over x, y and z", layer.n, k)
    rows = s.samples_of if layer.pixels is not None else s.rows()
    cut_by_heads = (layer.heads or 0) % s.size("x", "y") == 0 if layer.heads else False
    # Rows of the head side are cut as whole sequences, which is asked below.
    heads_out = layer.heads is not None and layer.head_axis == layer.n_axis
    heads_in = layer.heads is not None and not heads_out
    for axis, always, of_heads in (
        (layer.n_axis, layer.always_in, heads_in),
        (layer.k_axis, layer.always_out, heads_out),
    ):
        what, bad = _divides("rows of a micro-batch over x or y", rows, s.size(axis))
        yield what, bad & np.asarray(s.sharded | always) & ~np.asarray(of_heads & cut_by_heads)
    if layer.heads is not None:
        yield _divides("heads over x and y", layer.heads, s.size(layer.head_axis))
        across = s.size(plan.other(layer.head_axis))
        yield "heads over x and y", ~np.asarray(cut_by_heads) & (s.samples_of % across != 0)


def _image(layer: plan.Any, s: Settings) -> Iterator[Refusal]:
    if isinstance(layer, plan.Concat):
        yield _divides("channels over x or y", layer.parts, s.size(layer.side))
        return
    side: plan.Side = getattr(layer, "side", "x")
    what, bad = _divides("samples of a micro-batch over x or y", s.samples_of, s.size(plan.other(side)))
    yield what, bad & np.asarray(s.sharded | (isinstance(layer, plan.Edge) and layer.kind == "stay"))
    if isinstance(layer, plan.ImageNorm):
        yield _divides("channels over x or y", layer.features, s.size(side))
    if isinstance(layer, plan.Edge):
        if layer.kind in ("join", "stay"):
            yield _divides("channels over x or y", layer.k, s.size(side))
        if layer.kind in ("slice", "stay"):
            yield _divides("channels over x or y", layer.n, s.size(side))
        if layer.kind == "grouped":
            yield _divides("channels over x or y", layer.groups, s.size(side))
