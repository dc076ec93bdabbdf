"""Bytes that a rank holds: parameters and their states for good, activations from forward to backward, and what comes and goes.

Activations are those that the layers of `cubeloom.parallel` keep for their backward, tensor by tensor. Left out are what lies
below tensors: the allocator's rounding, workspaces of libraries, and buffers of communicators.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from cubeloom.parallel import specs
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.specs import LayerSpec
from cubeloom.plan.cost_model.transient_memory import FusedHead, passing
from cubeloom.plan.model import Piece


class PieceMemory(NamedTuple):
    """Of one piece."""

    parameters: Any  # numbers of a rank, without a weight that another piece owns
    states: Any  # of them, what a rank keeps optimizer states of if those are cut over replicas
    alone: Any  # of them, those whose gradient no replica sums
    shared: Any  # numbers of a weight that another piece owns
    shared_states: Any
    shared_alone: Any
    activations: Any  # bytes that one micro-batch keeps
    inside: Any  # of them, what is inside attention
    found: Any  # of them, gradients that a head finds in its forward
    noted: Any  # bytes that are kept for weight gradients that were put off
    forward: Any  # the most bytes beyond all activations of the piece, while it is computed
    backward: Any
    adding: Any  # the same, where weight gradients are added to earlier ones
    again: Any  # while its forward is computed once more, and back, of a block
    again_adding: Any
    gathered: Any  # bytes of all its gathered weights
    largest: Any  # of its largest weight, whole along z
    given: Any  # bytes that it keeps where its forward is computed once more: of a block, what it was given


def room(piece: Piece, s: ParallelConfig) -> PieceMemory:
    nothing: Any = np.float64(0)
    owned = shared = (nothing, nothing, nothing)
    gathered = largest = noted = nothing
    for layer in piece.layers:
        for each in layer.parameters(s):
            own, replicas = each.numbers(s) * each.when, s.size(*each.partial)
            more = (own, own / replicas, own * (replicas == 1))
            if each.name == f"{getattr(layer, 'shares', None)}.weight":
                shared = _added(shared, more)
            else:
                owned = _added(owned, more)
        if isinstance(layer, specs.LinearSpec):
            whole = layer.k * layer.n * layer.kernel_numel / s.size("x", "y") * s.item
            gathered = gathered + whole * s.gathers
            largest = np.maximum(largest, whole)
            into, out = layer.rows_in(s), layer.rows_out(s)
            # An input of which the shard was kept is under way to be whole when its weight gradient is put off.
            again = (s.size(layer.n_axis) > 1) & (s.sharded | layer.always_in) & s.regathered
            inputs = into * layer.k / s.size(layer.k_axis) * (1 + again / s.size(layer.n_axis))
            noted = noted + (inputs + out * layer.n / s.size(layer.n_axis)) * s.item
    head = joined(piece, s)
    kept = {layer.name: saved(layer, s, head) for layer in piece.layers}
    stream = sum(each.elements(piece.tokens, s) for each in piece.outputs) * s.item / s.ways
    most = passing(piece, s, lambda layer: kept[layer.name], head, 0.0 if head is not None else stream)
    found = nothing if head is None else head.found
    activations = sum(kept.values(), start=nothing)
    inside = sum((layer.inside(s) for layer in piece.layers if isinstance(layer, specs.AttentionSpec)), start=nothing)
    given = _given(piece, s) if piece.block else activations
    return PieceMemory(*owned, *shared, activations, inside, found, noted, *most, gathered, largest, given)


def _given(piece: Piece, s: ParallelConfig) -> Any:
    """What a block is given is as large as what it gives; of several tensors that are handed on, most belong to others."""
    each = [output.elements(piece.tokens, s) * s.item for output in piece.outputs]
    return reduce(np.maximum, each) if piece.tokens else each[-1]


def _added(first: tuple[Any, Any, Any], second: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    return first[0] + second[0], first[1] + second[1], first[2] + second[2]


def joined(piece: Piece, s: ParallelConfig) -> FusedHead | None:
    """Where the head is computed together with its loss (`parallel.layers.head`)."""
    for layer in piece.layers:
        if isinstance(layer, specs.LinearSpec) and layer.with_loss:
            return FusedHead(
                np.asarray(layer.fits_loss(s)),
                s.rows() * layer.k / s.size(layer.k_axis) * s.item,
                layer.k * layer.n / s.size("x", "y") * s.gradient * s.ways,
            )
    return None


def saved(layer: LayerSpec, s: ParallelConfig, joined: FusedHead | None = None) -> Any:
    """Bytes that a layer keeps from its forward to its backward. A head `joined` with its loss keeps both its gradients."""
    if joined is not None and isinstance(layer, specs.LinearSpec) and layer.with_loss:
        return layer.saved(s) * (1 - joined.where) + joined.found
    if joined is not None and isinstance(layer, specs.LossSpec):
        return layer.saved(s, 1 - joined.where)
    return layer.saved(s)
