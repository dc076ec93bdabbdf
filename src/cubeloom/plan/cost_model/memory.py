"""Bytes that a rank holds: parameters and their states, activations from forward to backward, and temporary tensors.

Activations are those that the layers of `cubeloom.parallel` keep for their backward, tensor by tensor. Not included is
memory below tensors: the allocator's rounding, workspaces of libraries, and buffers of communicators.
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
    """The memory of one piece."""

    parameters: Any  # elements on a rank, without a weight that another piece owns
    states: Any  # those whose optimizer states the rank keeps, if these are sharded over replicas
    alone: Any  # those whose gradient is not reduced over replicas
    shared: Any  # elements of a weight that another piece owns
    shared_states: Any
    shared_alone: Any
    activations: Any  # bytes that one micro-batch keeps
    inside: Any  # of these, what is inside attention
    found: Any  # of these, gradients that a fused head computes in its forward
    noted: Any  # bytes kept for deferred weight gradients
    forward: Any  # the most bytes beyond the piece's activations during its forward
    backward: Any
    adding: Any  # the same, if weight gradients are added to earlier ones
    again: Any  # during the recomputed forward and the backward of a block
    again_adding: Any
    gathered: Any  # bytes of all its gathered weights
    largest: Any  # of its largest weight, gathered along z
    given: Any  # bytes that it keeps if its forward is recomputed: the inputs of a block
    pair: Any  # elements that the rank updates of the two largest parameters that follow each other


def room(piece: Piece, s: ParallelConfig) -> PieceMemory:
    nothing: Any = np.float64(0)
    owned = shared = (nothing, nothing, nothing)
    gathered = largest = noted = nothing
    parts: dict[str, Any] = {}  # in the order in which they are updated
    for layer in piece.layers:
        for each in layer.parameters(s):
            own, replicas = each.numbers(s) * each.when, s.size(*each.partial)
            more = (own, own / replicas, own * (replicas == 1))
            if each.name == f"{getattr(layer, 'shares', None)}.weight":
                shared = _added(shared, more)
            else:
                owned = _added(owned, more)
                parts[each.name] = parts.get(each.name, nothing) + more[1]
        if isinstance(layer, specs.LinearSpec):
            whole = layer.k * layer.n * layer.kernel_numel / s.size("x", "y")
            nbytes = s.bytes_of(layer.operand)
            gathered = gathered + whole * nbytes * s.gathers
            largest = np.maximum(largest, whole * s.item)
            into, out = layer.rows_in(s), layer.rows_out(s)
            # If only the shard of an input was kept, it is being gathered when its weight gradient is deferred.
            again = (s.size(layer.n_axis) > 1) & (s.sharded | layer.always_in) & s.regathered
            inputs = into * layer.k / s.size(layer.k_axis) * (1 + again / s.size(layer.n_axis))
            noted = noted + (inputs + out * layer.n / s.size(layer.n_axis)) * nbytes
    head = joined(piece, s)
    kept = {layer.name: saved(layer, s, head) for layer in piece.layers}
    stream = sum(each.elements(piece.tokens, s) for each in piece.outputs) * s.item / s.ways
    most = passing(piece, s, lambda layer: kept[layer.name], head, 0.0 if head is not None else stream)
    found = nothing if head is None else head.found
    activations = sum(kept.values(), start=nothing)
    inside = sum((layer.inside(s) for layer in piece.layers if isinstance(layer, specs.AttentionSpec)), start=nothing)
    given = _given(piece, s) if piece.block else activations
    return PieceMemory(
        *owned, *shared, activations, inside, found, noted, *most, gathered, largest, given, _pair(parts)
    )


def _pair(parts: dict[str, Any]) -> Any:
    """The most elements of two parameters that follow each other."""
    sizes = list(parts.values())
    return reduce(np.maximum, map(np.add, sizes, [*sizes[1:], np.float64(0)]), np.float64(0))


def _given(piece: Piece, s: ParallelConfig) -> Any:
    """The inputs of a block are as large as its outputs; of several tensors between stages, most belong to other
    blocks.
    """
    each = [output.elements(piece.tokens, s) * s.item for output in piece.outputs]
    return reduce(np.maximum, each) if piece.tokens else each[-1]


def _added(first: tuple[Any, Any, Any], second: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    return first[0] + second[0], first[1] + second[1], first[2] + second[2]


def joined(piece: Piece, s: ParallelConfig) -> FusedHead | None:
    """Where the head is fused with its loss (`parallel.layers.head`)."""
    for layer in piece.layers:
        if isinstance(layer, specs.LinearSpec) and layer.with_loss:
            return FusedHead(
                np.asarray(layer.fits_loss(s)),
                s.rows() * layer.k / s.size(layer.k_axis) * s.item,
                layer.k * layer.n / s.size("x", "y") * s.gradient * s.ways,
            )
    return None


def saved(layer: LayerSpec, s: ParallelConfig, joined: FusedHead | None = None) -> Any:
    """Bytes that a layer keeps from its forward to its backward. A fused head keeps both its gradients."""
    if joined is not None and isinstance(layer, specs.LinearSpec) and layer.with_loss:
        return layer.saved(s) * (1 - joined.where) + joined.found
    if joined is not None and isinstance(layer, specs.LossSpec):
        return layer.saved(s, 1 - joined.where)
    return layer.saved(s)
