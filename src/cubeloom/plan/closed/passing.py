"""What comes and goes while a piece is computed, beside what its layers keep: results on their way, gradients, whole weights.

The layers are walked forward and back, each with what lives at its fullest moment. Of several strands one computes at a
time, so that rows are those of one strand; weights and their gradients are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cubeloom.plan.closed.compute import at_rest
from cubeloom.plan.closed.settings import Settings, choose
from cubeloom.plan.model import layers as plan

CHUNK = 2**29  # bytes of logits that a head and its loss compute at a time: `cube.head`


class Passing(NamedTuple):
    """The most bytes at once beyond all that the piece keeps: in its forward, in its backward, and in a forward once more."""

    forward: Any
    backward: Any
    again: Any


class Joined(NamedTuple):
    """A head that is computed together with its loss: where, and what it finds in its forward for the backward."""

    where: Any
    input_gradient: Any
    weight_gradient: Any  # a whole one for each strand

    @property
    def found(self) -> Any:
        return self.where * (self.input_gradient + self.weight_gradient)


def passing(
    piece: plan.Piece, s: Settings, keeps: Callable[[plan.Any], Any], joined: Joined | None, stream: Any
) -> Passing:
    """`keeps` says what a layer keeps; `stream` is what the piece hands on, whose gradient passes beside the layers."""
    kept: Any = np.float64(0)
    forward = backward = kept
    before = _gathered_before(piece.layers, s)
    gradient: Any = np.float64(0)  # of the weight whose gradient is computed before, as the backward goes
    levels = []
    for layer in piece.layers:
        kept = kept + keeps(layer)
        levels.append(kept)
    for place, layer in enumerate(piece.layers):
        beside = _forward(layer, s, joined) + before[(place + 1) % len(before)] + before[place]
        forward = np.maximum(forward, levels[place] - kept + beside)
    for place, layer in reversed(list(enumerate(piece.layers))):
        whole = before[place] + before[place - 1]
        beside = stream + _backward(layer, s, joined, gradient, whole)
        backward = np.maximum(backward, levels[place] - kept + beside)
        own = _weight(layer, s)
        gradient = own if own is not None else gradient
    again = forward
    for layer in piece.layers:
        # By then a strand before has the gradient of its logits, and no other waits.
        if isinstance(layer, plan.Loss) and not layer.whole:
            again = again - (s.ways > 1) * _logits(layer, s) * s.statistic
        elif isinstance(layer, plan.Linear) and layer.with_loss:
            part, k_cut = _linear(layer, s)[2::2]
            again = again + (s.ways > 1) * k_cut * part
    # A head that found its gradients is not computed again.
    return Passing(forward, backward, again if joined is None else again * (1 - joined.where))


def _weight(layer: plan.Any, s: Settings) -> Any:
    """Bytes of a weight that is whole along z, if the layer has one."""
    match layer:
        case plan.Linear():
            return layer.k * layer.n * layer.taps / s.size("x", "y") * s.item
        case plan.Embedding():
            return layer.entries * layer.features / s.size("x", "y") * s.item
    return None


def _gathered_before(layers: Sequence[plan.Any], s: Settings) -> list[Any]:
    """Of each layer the weight that it gathers along z; nothing for others."""
    nothing = np.float64(0)
    found = [_weight(layer, s) for layer in layers]
    return [nothing if own is None else own * s.gathers for own in found]


def _forward(layer: plan.Any, s: Settings, joined: Joined | None) -> Any:
    match layer:
        case plan.Linear():
            whole, rested, part, out, k_cut, n_cut = _linear(layer, s)
            summed = choose(s.sharded | layer.always_out, out, part) * k_cut
            # Strands that wait for their sum hold their summands.
            passing = part * choose(k_cut, s.ways, 1) + summed + out * layer.bias + rested * n_cut
            if joined is None or not layer.with_loss:
                return passing
            return choose(joined.where, whole, passing)
        case plan.Norm():
            numbers = _stream(layer, s)
            return numbers * choose(s.x > 1, 3 * s.statistic, s.item)
        case plan.Pointwise():
            return at_rest(layer, s) / s.ways * layer.outputs * s.item
        case plan.Attention():
            return _heads(layer, s) * (layer.heads * (2 if layer.rotary else 1)) * s.item
        case plan.Embedding():
            return s.rows() / s.ways * layer.features / s.x * s.item * 2
        case plan.Loss() if not layer.whole:
            logits = _logits(layer, s)
            wide = s.statistic if s.item < s.statistic else 0
            # Other strands wait with their logits.
            apart = logits * (s.ways * s.item + wide + s.statistic)
            if joined is None:
                return apart
            some = logits / _chunks(logits * s.item)
            # Its input is still there; with one chunk the weight's gradient is not yet.
            whole = joined.input_gradient / s.ways
            rested = choose(s.sharded & (s.y > 1), whole / s.y, 0.0)
            spared = choose(logits > some, 0.0, joined.weight_gradient / s.ways)
            return choose(joined.where, some * (s.item + 3 * s.statistic) + whole + rested - spared, apart)
    return np.float64(0)


def _backward(layer: plan.Any, s: Settings, joined: Joined | None, before: Any, gathered: Any) -> Any:
    """`before` is a weight's gradient that is still on its way, `gathered` are weights."""
    match layer:
        case plan.Linear():
            whole, rested, part, _, k_cut, n_cut = _linear(layer, s)
            # The gradient of what is added to the stream is the stream's own, unless it is gathered.
            gradient = part if layer.side == "x" or layer.with_loss else part * k_cut
            own = layer.k * layer.n * layer.taps / s.size("x", "y") * s.item
            then = own + choose(s.sharded | layer.always_in, rested, whole) * n_cut
            passing = gradient + whole + before + np.maximum(gathered, then)
            if joined is None or not layer.with_loss:
                return passing
            wide = 8 / s.item if s.item < 4 else 1  # scaled in float32
            return choose(joined.where, own * wide, passing)
        case plan.Norm():
            numbers = _stream(layer, s)
            return numbers * choose(s.x > 1, 4 * s.statistic, 2 * s.item) + before
        case plan.Pointwise():
            return at_rest(layer, s) / s.ways * (layer.inputs + layer.outputs) * s.item + before
        case plan.Attention():
            return _heads(layer, s) * (layer.heads + 2 * (layer.heads + 2 * layer.kv_heads)) * s.item + before
        case plan.Embedding():
            rows = s.rows() / s.ways * layer.features / s.x * s.item
            return 2 * rows + layer.entries * layer.features / s.size("x", "y") * s.item + before
        case plan.Loss() if not layer.whole:
            logits = _logits(layer, s)
            apart = logits * (s.statistic + (s.item if s.item < s.statistic else 0))
            return apart if joined is None else choose(joined.where, 0.0, apart)
    return np.float64(0)


def _linear(layer: plan.Linear, s: Settings) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Bytes of its input whole and at rest, of its result as summands and at rest; where k and n are cut."""
    into, out = layer.pixels or (None, None)
    k, n = s.size(layer.k_axis), s.size(layer.n_axis)
    whole = s.rows(into) / s.ways * layer.k / k * s.item
    part = s.rows(out) / s.ways * layer.n / n * s.item
    rested = whole / s.further(layer.n_axis, layer.always_in)
    return (
        whole,
        rested,
        part,
        part / s.further(layer.k_axis, layer.always_out),
        k > 1,
        (n > 1) & (s.sharded | layer.always_in),
    )


def _stream(layer: plan.Norm, s: Settings) -> Any:
    return s.rows() / s.ways / s.further("y", layer.always) * layer.features / s.x


def _heads(layer: plan.Attention, s: Settings) -> Any:
    """Numbers of one head, on one rank."""
    return s.rows(layer.length) / s.ways / s.size("x", "y") * layer.head_dim


def _logits(layer: plan.Loss, s: Settings) -> Any:
    """Of a strand."""
    return s.rows() / s.ways * layer.classes / s.size("x", "y")


def _chunks(nbytes: Any) -> Any:
    """Halved until small enough."""
    return 2.0 ** np.ceil(np.log2(np.maximum(1.0, nbytes / CHUNK)))
