"""What a block of a model communicates when its forward is recomputed, and which results it can keep for that."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.specs.linear import LinearSpec
from cubeloom.parallel.specs.spec import Collective, LayerSpec, collectives
from cubeloom.parallel.specs.whole import DropoutSpec, FeedForwardSpec

_FLOPS_A_BYTE = 1000.0
"""Multiplications that take as long as a byte takes to arrive: of today's accelerators on a node, about."""


@dataclass(frozen=True)
class Budget:
    """Blocks are recomputed, but for results of layers that they keep: so many bytes of a rank, beside the blocks' inputs."""

    nbytes: int


def last_linear(block: Sequence[LayerSpec]) -> LinearSpec | None:
    """The linear that a block ends with, if nothing behind it keeps anything for its backward.

    Then its result is not recomputed: it would only be added to the stream. Convolutions are followed by activation
    functions, and what follows in a block that others wrote is not known.
    """
    layers = [layer for layer in block if not isinstance(layer, FeedForwardSpec) and not _drops_nothing(layer)]
    last = layers[-1] if layers else None
    plain = type(last) is LinearSpec and last.pixels is None and not last.turn
    return last if plain else None  # type: ignore[return-value]


def _drops_nothing(layer: LayerSpec) -> bool:
    return isinstance(layer, DropoutSpec) and layer.probability == 0


def repeated(
    block: Sequence[LayerSpec], c: ParallelConfig, kept: Collection[str] = ()
) -> Iterator[tuple[Collective, int]]:
    """The collectives of a recomputed forward; -1 for those that the backward behind it then does not need.

    A weight that rests sharded is gathered for that forward, and stays whole until its backward. A layer whose result is
    `kept` gathers its input alone, unless its shard was kept.
    """
    last = last_linear(block)
    for layer in block:
        for each in collectives(layer, c):
            result = isinstance(layer, LinearSpec) and not each.of_weight and each.axes == (layer.k_axis,)
            if layer.name in kept:
                if each.phase == "F" and not each.of_weight and not result and not c.regathered:
                    yield each, 1
            elif each.phase == "F" and not each.gathered_to_keep and not (result and layer is last):
                yield each, 1
            elif each.phase == "I" and each.of_weight:
                yield each, -1


def kept_results(
    blocks: Mapping[str, Sequence[LayerSpec]], flying: Mapping[str, float], c: ParallelConfig, budget: Budget
) -> dict[str, frozenset[str]]:
    """Of each block the layers whose results are kept: those that take longest to compute for their bytes, while they fit.

    `flying`: how many micro-batches of a block are in flight at once; `c` is of one of them.
    """
    candidates: list[tuple[float, float, str, str]] = []
    for name, layers in blocks.items():
        for layer in layers:
            if type(layer) is LinearSpec and not layer.turn and layer is not last_linear(layers):
                nbytes, cost = _result(layer, c)
                candidates.append((-cost / nbytes, nbytes * flying[name], name, layer.name))
    found: dict[str, set[str]] = {name: set() for name in blocks}
    left = float(budget.nbytes)
    for _, nbytes, name, layer_name in sorted(candidates, key=lambda each: (each[0], list(blocks).index(each[2]))):
        if nbytes <= left:
            left -= nbytes
            found[name].add(layer_name)
    return {name: frozenset(layers) for name, layers in found.items()}


def _result(layer: LinearSpec, c: ParallelConfig) -> tuple[float, float]:
    """Bytes of a linear's result on a rank, and what it costs to compute, in multiplications."""
    (product,) = layer.products(c)
    rests: Any = c.size(layer.k_axis) if layer.spread_out(c) != "replicated" else 1
    moved = [each.received for each in collectives(layer, c) if each.phase == "F" and each.axes == (layer.k_axis,)]
    flops = 2.0 * float(product.rows * product.k * product.n * product.kernel_numel)
    return float(product.rows * product.n * c.item / rests), flops + _FLOPS_A_BYTE * float(sum(moved))
