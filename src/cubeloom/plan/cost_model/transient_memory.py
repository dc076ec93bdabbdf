"""What comes and goes while a piece is computed, beside what its layers keep: results on their way, gradients, whole weights.

The layers are walked forward and back, each with what lives at its fullest moment. Of several strands one computes at a
time, so that rows are those of one strand; weights and their gradients are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cubeloom.parallel import specs
from cubeloom.parallel.config import FREED, ParallelConfig
from cubeloom.parallel.specs import LayerSpec
from cubeloom.plan.model import Piece

CHUNK = 2**29  # bytes of logits that a head and its loss compute at a time: `parallel.layers.head`
_LITTLE = (
    *(specs.TableSpec, specs.DropoutSpec, specs.LossSpec, specs.SquaredLossSpec, specs.ImageNormSpec, specs.EdgeSpec),
    *(specs.ReplicatedSpec, specs.FirstTokenSpec, specs.CopyToRegionSpec, specs.ConcatSpec, specs.FeedForwardSpec),
    *(specs.WholeSpec, specs.TracedLossSpec),  # of traced models, a BetweenSpec has it
)


class TransientMemory(NamedTuple):
    """The most bytes at once beyond all that the piece keeps: in its forward, and in its backward."""

    forward: Any
    backward: Any
    adding: Any  # in a backward whose weight gradients are added to those of earlier micro-batches
    again: Any  # in a forward that is computed once more, of a block, and the backward behind it
    again_adding: Any


class FusedHead(NamedTuple):
    """A head that is computed together with its loss: where, and what it finds in its forward for the backward."""

    where: Any
    input_gradient: Any
    weight_gradient: Any  # a whole one for each strand

    @property
    def found(self) -> Any:
        return self.where * (self.input_gradient + self.weight_gradient)


def passing(
    piece: Piece, s: ParallelConfig, keeps: Callable[[LayerSpec], Any], joined: FusedHead | None, stream: Any
) -> TransientMemory:
    """`keeps` says what a layer keeps; `stream` is what the piece hands on, whose gradient passes beside the layers."""
    layers, nothing = piece.layers, np.float64(0)
    weights = [_weight(layer, s) for layer in layers]
    # A linear's that are kept are counted as such; a table is gathered anew each time.
    freed = s.gathers & (s.weights == FREED)
    gathered = [
        nothing if own is None else own * (s.gathers if isinstance(layer, specs.EmbeddingSpec) else freed)
        for layer, own in zip(layers, weights, strict=True)
    ]
    scattered = s.gathers  # a weight's gradient, which is then whole for a moment
    depth = s.z
    # The rows of one strand, on this rank.
    s = replace(s, samples=s.samples_of / s.ways, data=1, z=1)
    sizes = [_linear(layer, s) if isinstance(layer, specs.LinearSpec) else None for layer in layers]
    kept = nothing
    levels = []
    for layer in layers:
        kept = kept + keeps(layer)
        levels.append(kept)

    def walked(waiting: Any) -> Any:
        """Forward, while so many other strands wait for a collective."""
        most = nothing
        for place, layer in enumerate(layers):
            beside = _forward(layer, s, joined, sizes[place], waiting)
            beside = beside + gathered[(place + 1) % len(layers)] + gathered[place]
            most = np.maximum(most, levels[place] - kept + beside)
        return most

    def back(made: Any) -> Any:
        """Backward, where `made` says whether weight gradients take room of their own."""
        most = nothing
        before: Any = nothing  # the gradient of the weight that was used after this one
        for place, layer in reversed(list(enumerate(layers))):
            weight = weights[place]
            own = None if weight is None else weight * (s.gradient / s.item) * made
            beside = _backward(layer, s, joined, sizes[place], before, own, gathered[place] + gathered[place - 1])
            most = np.maximum(most, levels[place] - kept + beside)
            before = before if own is None else own
        return most + stream

    def redone(made: Any) -> Any:
        """Forward once more and backward: weights that were gathered stay until their own gradient is computed."""
        most = staying = nothing
        for place, layer in enumerate(layers):
            staying = staying + gathered[place]
            beside = _forward(layer, s, joined, sizes[place], 0) + staying + gathered[(place + 1) % len(layers)]
            most = np.maximum(most, levels[place] - kept + beside)
        made = s.gradient / s.item * (made + scattered / depth)  # whole, and this rank's part of the sum
        own_weights = [weight for weight in weights if weight is not None]
        before: Any = own_weights[0] * made * scattered if own_weights else nothing  # of the block behind
        for place, layer in reversed(list(enumerate(layers))):
            weight = weights[place]
            own = None if weight is None else weight * made
            staying = staying - gathered[place]
            ahead = staying + (gathered[place] if place == 0 else 0.0)
            beside = _backward(layer, s, joined, sizes[place], before, own, gathered[place]) + ahead
            most = np.maximum(most, levels[place] - kept + beside)
            before = before if own is None else own
        return most + stream

    again = (redone(1), redone(scattered)) if piece.block else (nothing, nothing)
    return TransientMemory(walked(s.ways - 1), back(1), back(scattered), *again)


def _weight(layer: LayerSpec, s: ParallelConfig) -> Any:
    """Bytes of a weight that is whole along z, if the layer has one."""
    match layer:
        case specs.LinearSpec():
            return layer.k * layer.n * layer.kernel_numel / s.size("x", "y") * s.item
        case specs.EmbeddingSpec():
            return layer.entries * layer.features / s.size("x", "y") * s.item
    return None


def _forward(layer: LayerSpec, s: ParallelConfig, joined: FusedHead | None, size: _Linear | None, waiting: Any) -> Any:
    match layer:
        case specs.LinearSpec():
            assert size is not None
            summed = np.where(s.sharded | layer.always_out, size.out, size.part)
            # Strands that wait for their sum hold their summands.
            cut = size.part * (1 + waiting) + summed
            passing = np.where(size.k_cut, cut, size.part) + size.rested * size.n_cut
            if layer.bias:
                passing = passing + size.out
            if joined is None or not layer.with_loss:
                return passing
            return np.where(joined.where, size.whole, passing)
        case specs.NormSpec():
            numbers = _stream(layer, s)
            return numbers * np.where(s.x > 1, 3 * s.statistic, s.item)
        case specs.TracedNormSpec():
            return layer.numbers(s) * np.where(s.size(*layer.axes) > 1, 3 * s.statistic, s.item)
        case specs.BetweenSpec():
            return layer.saved(s)  # as much as it keeps, on its way
        case specs.PointwiseSpec():
            return layer.at_rest(s) * layer.outputs * s.item
        case specs.AttentionSpec():
            return _heads(layer, s) * (layer.heads * (2 if layer.rotary else 1)) * s.item
        case specs.EmbeddingSpec():
            return s.rows() * layer.features / s.x * s.item * 2
        case specs.LossSpec() if not layer.whole:
            logits = _logits(layer, s)
            wide = s.statistic if s.item < s.statistic else 0
            # Other strands wait with their logits; or with summands of them, and have kept nothing yet.
            more = np.maximum(0, s.x * s.item - s.statistic)
            apart = logits * (s.item + wide + s.statistic + waiting * (s.item + more))
            if joined is None:
                return apart
            some = logits / _chunks(logits * s.item)
            # Its input is still there; with one chunk the weight's gradient is not yet.
            whole = joined.input_gradient / s.ways
            rested = np.where(s.sharded & (s.y > 1), whole / s.y, 0.0)
            spared = np.where(logits > some, 0.0, joined.weight_gradient / s.ways)
            # Torch's softmax works on wide logits; where they are cut it is ours, which has two wide copies in any case.
            copies = s.statistic + np.where(s.y > 1, s.statistic, wide)
            return np.where(joined.where, some * (s.item + copies) + whole + rested - spared, apart)
    return _little(layer)


def _little(layer: LayerSpec) -> Any:
    """Of layers that make few numbers, or whose numbers are counted with others'. A kind that nobody thought of is an error."""
    if not isinstance(layer, _LITTLE):
        raise TypeError(f"nobody has said what comes and goes in a {type(layer).__name__}")
    return np.float64(0)


def _backward(
    layer: LayerSpec,
    s: ParallelConfig,
    joined: FusedHead | None,
    size: _Linear | None,
    before: Any,
    own: Any,
    gathered: Any,
) -> Any:
    """`own` is the weight's gradient, `before` another's that is still on its way, `gathered` are weights."""
    match layer:
        case specs.LinearSpec():
            assert size is not None
            # The gradient of what is added to the stream is the stream's own, unless it is gathered.
            gradient = size.part if layer.side == "x" or layer.with_loss else size.part * size.k_cut
            then = own + size.rested * size.n_cut
            passing = gradient + size.whole + before + np.maximum(gathered, then)
            if joined is None or not layer.with_loss:
                return passing
            return np.where(joined.where, 0.0, passing)  # what it found is scaled in place
        case specs.NormSpec():
            numbers = _stream(layer, s)
            return numbers * np.where(s.x > 1, 4 * s.statistic, 2 * s.item) + before
        case specs.TracedNormSpec():
            return layer.numbers(s) * np.where(s.size(*layer.axes) > 1, 4 * s.statistic, 2 * s.item) + before
        case specs.BetweenSpec():
            return layer.saved(s) + before
        case specs.PointwiseSpec():
            return layer.at_rest(s) * (layer.inputs + layer.outputs) * s.item + before
        case specs.AttentionSpec():
            return _heads(layer, s) * (layer.heads + 2 * (layer.heads + 2 * layer.kv_heads)) * s.item + before
        case specs.EmbeddingSpec():
            rows = s.rows() * layer.features / s.x * s.item
            wide = rows * (s.gradient / s.item) * (s.gradient > s.item)
            return 2 * rows + wide + own + before
        case specs.LossSpec() if not layer.whole:
            logits = _logits(layer, s)
            apart = logits * (s.statistic + (s.item if s.item < s.statistic else 0))
            return apart if joined is None else np.where(joined.where, 0.0, apart)
    return _little(layer)


class _Linear(NamedTuple):
    """Bytes of a linear's input whole and at rest, of its result as summands and at rest; where it is summed and gathered."""

    whole: Any
    rested: Any
    part: Any
    out: Any
    k_cut: Any
    n_cut: Any


def _linear(layer: specs.LinearSpec, s: ParallelConfig) -> _Linear:
    k, n = s.size(layer.k_axis), s.size(layer.n_axis)
    whole = layer.rows_in(s) * (layer.k * s.item) / k
    part = layer.rows_out(s) * (layer.n * s.item) / n
    always_in, always_out = layer.always_in, layer.always_out
    if isinstance(layer, specs.TracedLinearSpec):
        always_in, always_out = layer.taken == "both", layer.given == "both"
    gathered = True if always_in else s.sharded
    rested = whole / (n if always_in else np.where(s.sharded, n, 1))
    scattered = part / (k if always_out else np.where(s.sharded, k, 1))
    return _Linear(whole, rested, part, scattered, k > 1, (n > 1) & gathered)


def _stream(layer: specs.NormSpec, s: ParallelConfig) -> Any:
    return s.rows() / s.row_parts("y", layer.always) * layer.features / s.x


def _heads(layer: specs.AttentionSpec, s: ParallelConfig) -> Any:
    """Numbers of one head, on one rank."""
    return s.rows(layer.length) / s.size("x", "y") * layer.head_dim


def _logits(layer: specs.LossSpec, s: ParallelConfig) -> Any:
    """Of a strand."""
    return s.rows() * layer.classes / s.size("x", "y")


def _chunks(nbytes: Any) -> Any:
    """Halved until small enough."""
    return np.exp2(np.ceil(np.log2(np.maximum(1.0, nbytes / CHUNK))))
