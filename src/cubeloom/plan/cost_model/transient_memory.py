"""Temporary memory while a piece is computed, besides what its layers keep: pending results, gradients, gathered
weights.

The layers are walked forward and back, each with what exists at its fullest moment. Of several strands one computes at
a time, so rows are those of one strand; weights and their gradients are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from cubeloom.parallel import specs
from cubeloom.parallel.config import FREED, ParallelConfig
from cubeloom.parallel.specs import LayerSpec
from cubeloom.plan.model import Piece

CHUNK = 2**29  # bytes of logits that the fused head computes at a time: `parallel.layers.head`
_LITTLE = (
    *(specs.TableSpec, specs.DropoutSpec, specs.LossSpec, specs.SquaredLossSpec, specs.ImageNormSpec, specs.EdgeSpec),
    *(specs.ReplicatedSpec, specs.FirstTokenSpec, specs.CopyToRegionSpec, specs.ConcatSpec, specs.FeedForwardSpec),
    *(specs.WholeSpec, specs.TracedLossSpec, specs.TracedChannelNormSpec),  # of traced models, a BetweenSpec has it
)


class TransientMemory(NamedTuple):
    """The most bytes at once beyond what the piece keeps: in its forward, and in its backward."""

    forward: Any
    backward: Any
    adding: Any  # in a backward whose weight gradients are added to those of earlier micro-batches
    again: Any  # in the recomputed forward of a block, and the backward after it
    again_adding: Any


class FusedHead(NamedTuple):
    """A head fused with its loss: where, and what its forward computes for the backward."""

    where: Any
    input_gradient: Any
    weight_gradient: Any  # a whole one for each strand

    @property
    def found(self) -> Any:
        return self.where * (self.input_gradient + self.weight_gradient)


def passing(
    piece: Piece, s: ParallelConfig, keeps: Callable[[LayerSpec], Any], joined: FusedHead | None, stream: Any
) -> TransientMemory:
    """`keeps`: what a layer keeps; `stream`: the piece's output, whose gradient exists beside the layers."""
    layers, nothing = piece.layers, np.float64(0)
    weights = [_weight(layer, s) for layer in layers]
    # A linear's kept weights are counted elsewhere; a table is gathered again each time.
    freed = s.gathers & (s.weights == FREED)
    gathered = [
        nothing
        if own is None
        else own * _share(layer, s) * (s.gathers if isinstance(layer, specs.EmbeddingSpec) else freed)
        for layer, own in zip(layers, weights, strict=True)
    ]
    scattered, depth = s.gathers, s.z  # of a weight's gradient, which is whole before its reduce-scatter
    # The rows of one strand on this rank.
    s = replace(s, samples=s.samples_of / s.ways, data=1, z=1)
    sizes = [_linear(layer, s) if isinstance(layer, specs.LinearSpec) else None for layer in layers]
    levels = list(accumulate(map(keeps, layers)))
    walk = _Walk(layers, s, joined, stream, weights, gathered, sizes, levels)
    wide = s.gradient / s.item
    most = walk.forward(s.ways - 1), walk.backward(wide), walk.backward(wide * scattered)
    if not piece.block:
        return TransientMemory(*most, nothing, nothing)
    # A reduce-scattered gradient exists as a whole and as this rank's part of the sum; so does that of the next block.
    part = scattered / depth
    behind = next((own * wide * (1 + part) * scattered for own in weights if own is not None), nothing)
    again = (
        np.maximum(walk.forward(0, stays=True) + stream, walk.backward(wide * (made + part), behind, stays=True))
        for made in (1, scattered)
    )
    return TransientMemory(*most, *again)


@dataclass(frozen=True)
class _Walk:
    """A walk through the layers of a piece. `levels`: what is kept up to each of them."""

    layers: Sequence[LayerSpec]
    s: ParallelConfig
    joined: FusedHead | None
    stream: Any
    weights: Sequence[Any]
    gathered: Sequence[Any]
    sizes: Sequence[_Linear | None]
    levels: Sequence[Any]

    def forward(self, waiting: Any, stays: bool = False) -> Any:
        """While `waiting` other strands wait for a collective. Gathered weights are freed after their use, or stay."""
        most = there = np.float64(0)
        for place, layer in enumerate(self.layers):
            there = self.gathered[place] + (there if stays else 0.0)
            beside = _forward(layer, self.s, self.joined, self.sizes[place], waiting)
            beside = beside + self.gathered[(place + 1) % len(self.layers)] + there
            most = np.maximum(most, self.levels[place] - self.levels[-1] + beside)
        return most

    def backward(self, made: Any, before: Any = 0.0, stays: bool = False) -> Any:
        """A weight's gradient takes `made` times its bytes. `before`: a gradient that is still being reduced.

        Gathered weights exist ahead of their use, or from the beginning.
        """
        most = np.float64(0)
        for place, layer in reversed(list(enumerate(self.layers))):
            own = None if self.weights[place] is None else self.weights[place] * made
            here, ahead = self.gathered[place] + self.gathered[place - 1], 0.0
            if stays:
                here, ahead = self.gathered[place], sum(self.gathered[: max(1, place)])
            beside = _backward(layer, self.s, self.joined, self.sizes[place], before, own, here) + ahead
            most = np.maximum(most, self.levels[place] - self.levels[-1] + beside)
            before = before if own is None else own
        return most + self.stream


def _weight(layer: LayerSpec, s: ParallelConfig) -> Any:
    """Bytes of a weight gathered along z, if the layer has one."""
    match layer:
        case specs.LinearSpec():
            return layer.k * layer.n * layer.kernel_numel / s.size("x", "y") * s.item
        case specs.EmbeddingSpec():
            return layer.entries * layer.features / s.size("x", "y") * s.item
    return None


def _share(layer: LayerSpec, s: ParallelConfig) -> float:
    """Of a weight's bytes, those that are gathered: FP8 rounds before."""
    return s.bytes_of(layer.operand) / s.item if isinstance(layer, specs.LinearSpec) else 1.0


def _forward(layer: LayerSpec, s: ParallelConfig, joined: FusedHead | None, size: _Linear | None, waiting: Any) -> Any:
    match layer:
        case specs.LinearSpec():
            assert size is not None
            summed = np.where(s.sharded | layer.always_out, size.out, size.part)
            # Strands that wait for their reduction hold partial sums.
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
            return layer.saved(s)  # temporarily as much as it keeps
        case specs.PointwiseSpec():
            return layer.at_rest(s) * layer.outputs * s.item
        case specs.AttentionSpec():
            return _heads(layer, s) * (layer.heads * (2 if layer.rotary else 1)) * s.item
        case specs.EmbeddingSpec():
            return s.rows() * layer.features / s.x * s.item * 2
        case specs.LossSpec() if not layer.whole:
            logits = _logits(layer, s)
            wide = s.statistic if s.item < s.statistic else 0
            # Other strands wait with their logits, or with partial sums of them, and have kept nothing yet.
            more = np.maximum(0, s.x * s.item - s.statistic)
            apart = logits * (s.item + wide + s.statistic + waiting * (s.item + more))
            if joined is None:
                return apart
            some = logits / _chunks(logits * s.item)
            # Its input still exists; with one chunk the weight's gradient does not exist yet.
            whole = joined.input_gradient / s.ways
            rested = np.where(s.sharded & (s.y > 1), whole / s.y, 0.0)
            spared = np.where(logits > some, 0.0, joined.weight_gradient / s.ways)
            # torch's softmax works on wide logits. For cut logits ours is used, which always has two wide copies.
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
            # The gradient of a projection to the residual stream is the stream's own, unless it is gathered.
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
    """Bytes of a linear's input gathered and stored, of its output as partial sums and stored, and where it is reduced."""

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
    """Elements of one head on one rank."""
    return s.rows(layer.length) / s.size("x", "y") * layer.head_dim


def _logits(layer: specs.LossSpec, s: ParallelConfig) -> Any:
    """Elements of a strand's logits."""
    return s.rows() * layer.classes / s.size("x", "y")


def _chunks(nbytes: Any) -> Any:
    """Halved until small enough."""
    return np.exp2(np.ceil(np.log2(np.maximum(1.0, nbytes / CHUNK))))
