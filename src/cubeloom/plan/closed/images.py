"""What the layers at the edges of networks on images communicate, and their parameters: see `parallel.image_forms`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cubeloom.plan.closed.linear import replicas
from cubeloom.plan.closed.moves import Move, Parameter
from cubeloom.plan.closed.settings import Settings
from cubeloom.plan.model.layers import Concat, Edge, ImageNorm, Share, Side, SquaredLoss, other

Images = Edge | ImageNorm | Share | Concat | SquaredLoss


def moves(layer: Images, s: Settings) -> Iterator[Move]:
    match layer:
        case Edge(kind="join"):
            count = own_samples(layer.side, s) * layer.pixels[1] * layer.n
            yield Move("F", "all_reduce", (layer.side,), count * s.item)
        case Edge(kind="stay"):
            yield from _stay(layer, s)
        case ImageNorm(groups=None):
            for phase in ("F", "I"):
                yield from _over_rows(phase, layer.side, 2 * layer.features / s.size(layer.side) * s.statistic, s)
        case ImageNorm(groups=int()):
            count = 2 * own_samples(layer.side, s) * layer.groups * s.statistic * (1 - whole_groups(layer, s))
            yield Move("F", "all_reduce", (layer.side,), count)
            yield Move("I", "all_reduce", (layer.side,), count)
        case Share():
            yield Move("I", "all_reduce", ("x", "y"), s.samples_of * layer.features * s.item)
        case SquaredLoss():
            yield from _over_rows("F", layer.side, 2 * s.statistic, s)


def parameters(layer: Images, s: Settings) -> Iterator[Parameter]:
    match layer:
        case Edge():
            across = other(layer.side)
            numbers = layer.k * layer.n * layer.taps // layer.groups / s.size(layer.side)
            rows = layer.n if layer.kind in ("join", "stay") else layer.n / s.size(layer.side)
            cut = 1 if layer.kind == "stay" else s.sharded
            yield from replicas(f"{layer.name}.weight", numbers, across, cut, rows)
            if layer.bias:
                own = layer.n if layer.kind == "join" else layer.n / s.size(layer.side)
                yield from replicas(f"{layer.name}.bias", own, across, s.sharded)
        case ImageNorm(affine=True):
            for kind in ("weight", "bias"):
                own = layer.features / s.size(layer.side)
                yield from replicas(f"{layer.name}.{kind}", own, other(layer.side), s.sharded)


def own_samples(side: Side, s: Settings) -> Any:
    """Samples of one rank, of an activation whose features lie on this side."""
    return s.samples_of / s.further(other(side))


def whole_groups(layer: ImageNorm, s: Settings) -> Any:
    """Where each rank has whole groups, no statistics travel."""
    assert layer.groups is not None
    return (layer.groups % s.size(layer.side) == 0) & (not layer.interleaved)


def _over_rows(phase: Any, side: Side, nbytes: Any, s: Settings) -> Iterator[Move]:
    yield Move(phase, "all_reduce", ("data", "z", other(side)), nbytes * s.sharded)
    yield Move(phase, "all_reduce", ("data", "z"), nbytes * (1 - s.sharded))


def _stay(layer: Edge, s: Settings) -> Iterator[Move]:
    side, across = layer.side, other(layer.side)
    into, out = (s.rows(pixels) * s.item for pixels in layer.pixels)
    scattered = out * layer.n / s.size(across)
    yield Move("F", "reduce_scatter", (side,), scattered)
    yield Move("I", "all_gather", (side,), scattered)
    # Where activations rest replicated, each rank computes its own samples only, and then gathers all.
    yield Move("F", "all_gather", (across,), out * layer.n / s.size(side) * (1 - s.sharded))
    yield Move("I", "all_gather", (across,), into * layer.k / s.size(side) * (1 - s.sharded))
