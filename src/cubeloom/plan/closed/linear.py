"""What a linear or a convolution inside the network communicates, and the parameters it has.

For `Y[M,N] = X[M,K] · W[K,N]` with K on one side and N on the other: X is gathered or its gradient summed along N's axis, Y
summed along K's, W gathered along z and its gradient scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cubeloom.plan.closed.moves import Move, Parameter
from cubeloom.plan.closed.settings import FREED, KEPT, Settings, choose
from cubeloom.plan.model.layers import Linear


def moves(layer: Linear, s: Settings) -> Iterator[Move]:
    n_axis, k_axis = (layer.n_axis,), (layer.k_axis,)
    into, out = layer.pixels or (None, None)
    x = s.rows(into) * layer.k / s.size(layer.k_axis) * s.item
    y = s.rows(out) * layer.n / s.size(layer.n_axis) * s.item
    shard_in, shard_out = s.sharded | layer.always_in, s.sharded | layer.always_out
    yield Move("F", "all_gather", n_axis, x * shard_in)
    yield Move("I", "reduce_scatter", n_axis, x * shard_in)
    yield Move("I", "all_reduce", n_axis, x * (1 - shard_in))
    yield Move("W", "all_gather", n_axis, x * (shard_in & s.regathered))
    yield Move("F", "reduce_scatter", k_axis, y * shard_out)
    yield Move("I", "all_gather", k_axis, y * shard_out)
    yield Move("F", "all_reduce", k_axis, y * (1 - shard_out))
    weight = layer.k * layer.n * layer.taps / s.size("x", "y")
    w = weight * s.item
    freed, kept = s.weights == FREED, s.weights == KEPT
    yield Move("F", "all_gather", ("z",), w * freed, of_weight=True)
    yield Move("F", "all_gather", ("z",), w * kept, of_weight=True, gathered_to_keep=True)
    yield Move("I", "all_gather", ("z",), w * freed, of_weight=True)
    yield Move("W", "reduce_scatter", ("z",), weight * s.gradient * s.weights_cut, of_weight=True)
    if layer.turn:
        turned = _turned(s.rows(out) * layer.n * s.item, s)
        yield Move("F", "exchange", ("x", "y"), turned)
        yield Move("I", "exchange", ("x", "y"), turned)


def _turned(whole: Any, s: Settings) -> Any:
    """What a rank has of its new block it keeps, and receives the rest (`parallel.volume` says which blocks)."""
    ix, iy = s.place
    low = np.maximum(ix / s.x, iy / s.y)
    high = np.minimum((ix + 1) / s.x, (iy + 1) / s.y)
    common = np.maximum(high - low, 0) ** 2
    return whole * (1 / (s.x * s.y) - common)


def parameters(layer: Linear, s: Settings) -> Iterator[Parameter]:
    numbers = layer.k * layer.n * layer.taps / s.size("x", "y")
    rows = layer.k / s.size(layer.k_axis) if layer.transposed else layer.n / s.size(layer.n_axis)
    yield from weight(layer.shares or layer.name, numbers, rows, s)
    if layer.bias:
        own = layer.n / s.size(layer.bias_axis)
        across = layer.k_axis if layer.bias_axis == layer.n_axis else layer.n_axis
        cut = s.sharded | layer.always_out
        yield from replicas(f"{layer.name}.bias", own, across, cut)


def weight(owner: str, numbers: Any, rows: Any, s: Settings) -> Iterator[Parameter]:
    """Sharded over z, replicas are along data; replicated, along data and z."""
    cut = s.weights_cut
    z = choose(cut, s.z, 1)
    yield Parameter(f"{owner}.weight", numbers / z, ("data",), cut, rows / z)
    yield Parameter(f"{owner}.weight", numbers, ("data", "z"), 1 - cut, rows)


def replicas(name: str, numbers: Any, across: str, cut: Any, rows: Any = None) -> Iterator[Parameter]:
    """What meets all rows of activations, those that `across` cuts as well where it does: a vector, or of so many rows."""
    rows = numbers if rows is None else rows
    yield Parameter(name, numbers, ("data", "z", across), cut, rows)
    yield Parameter(name, numbers, ("data", "z"), 1 - cut, rows)
