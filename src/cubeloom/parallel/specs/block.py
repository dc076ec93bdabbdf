"""The communication of a block whose forward is recomputed in its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.specs.linear import LinearSpec
from cubeloom.parallel.specs.spec import Collective, LayerSpec, collectives
from cubeloom.parallel.specs.whole import DropoutSpec, FeedForwardSpec


def last_linear(block: Sequence[LayerSpec]) -> LinearSpec | None:
    """The last linear of a block, if no later layer keeps anything for its backward.

    Its result is then not recomputed: it would only be added to the residual stream. This does not hold for
    convolutions, which are followed by activation functions, nor for blocks of other people's models, whose following
    code is not known.
    """
    layers = [layer for layer in block if not isinstance(layer, FeedForwardSpec) and not _drops_nothing(layer)]
    last = layers[-1] if layers else None
    plain = type(last) is LinearSpec and last.pixels is None and not last.turn
    return last if plain else None  # type: ignore[return-value]


def _drops_nothing(layer: LayerSpec) -> bool:
    return isinstance(layer, DropoutSpec) and layer.probability == 0


def repeated(block: Sequence[LayerSpec], c: ParallelConfig) -> Iterator[tuple[Collective, int]]:
    """The collectives of a recomputed forward; -1 for those that its backward then does not need.

    A sharded weight is gathered for this forward, and kept until its backward.
    """
    last = last_linear(block)
    for layer in block:
        for each in collectives(layer, c):
            result = layer is last and each.axes == (layer.k_axis,)
            if each.phase == "F" and not each.gathered_to_keep and (each.of_weight or not result):
                yield each, 1
            elif each.phase == "I" and each.of_weight:
                yield each, -1
