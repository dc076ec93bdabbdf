"""The closed forms of any layer, by its type."""

from __future__ import annotations

from collections.abc import Iterator

from cubeloom.plan.closed import images, linear, tokens
from cubeloom.plan.closed.moves import Move, Parameter
from cubeloom.plan.closed.settings import Settings
from cubeloom.plan.model import layers as plan


def moves(layer: plan.Any, s: Settings) -> Iterator[Move]:
    """The collectives of one forward and backward, without the sums of gradients over replicas."""
    match layer:
        case plan.Linear():
            return linear.moves(layer, s)
        case plan.Edge() | plan.ImageNorm() | plan.Share() | plan.Concat() | plan.SquaredLoss():
            return images.moves(layer, s)
        case plan.Attention() | plan.Pointwise():
            return iter(())
    return tokens.moves(layer, s)


def parameters(layer: plan.Any, s: Settings) -> Iterator[Parameter]:
    match layer:
        case plan.Linear():
            return linear.parameters(layer, s)
        case plan.Edge() | plan.ImageNorm() | plan.Share() | plan.Concat() | plan.SquaredLoss():
            return images.parameters(layer, s)
        case plan.Attention() | plan.Pointwise():
            return iter(())
    return tokens.parameters(layer, s)
