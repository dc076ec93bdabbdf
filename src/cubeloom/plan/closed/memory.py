"""Bytes that a rank holds: parameters and their states for good, activations from forward to backward, and what comes and goes.

Activations are those that the layers of `cubeloom.parallel` keep for their backward, tensor by tensor. Left out are what lies
below tensors: the allocator's rounding, workspaces of libraries, and buffers of communicators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cubeloom.plan.closed.compute import at_rest
from cubeloom.plan.closed.images import own_samples, whole_groups
from cubeloom.plan.closed.layer import parameters
from cubeloom.plan.closed.passing import Joined, passing
from cubeloom.plan.closed.settings import REPLICATED, Settings, choose
from cubeloom.plan.model import layers as plan


class Room(NamedTuple):
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
    again: Any  # while its forward is computed once more
    gathered: Any  # bytes of all its gathered weights
    largest: Any  # of its largest weight, whole along z


def room(piece: plan.Piece, s: Settings) -> Room:
    nothing: Any = np.float64(0)
    owned = shared = (nothing, nothing, nothing)
    gathered = largest = noted = nothing
    for layer in piece.layers:
        for each in parameters(layer, s):
            own, replicas = each.numbers * each.exists, s.size(*each.axes)
            more = (own, own / replicas, own * (replicas == 1))
            if each.name == f"{getattr(layer, 'shares', None)}.weight":
                shared = _added(shared, more)
            else:
                owned = _added(owned, more)
        if isinstance(layer, plan.Linear):
            whole = layer.k * layer.n * layer.taps / s.size("x", "y") * s.item
            gathered = gathered + whole * s.gathers
            largest = np.maximum(largest, whole)
            into, out = (s.rows(pixels) for pixels in layer.pixels or (None, None))
            # An input of which the shard was kept is under way to be whole when its weight gradient is put off.
            again = (s.size(layer.n_axis) > 1) & (s.sharded | layer.always_in) & s.regathered
            inputs = into * layer.k / s.size(layer.k_axis) * (1 + again / s.size(layer.n_axis))
            noted = noted + (inputs + out * layer.n / s.size(layer.n_axis)) * s.item
    head = joined(piece, s)
    kept = {layer.name: saved(layer, s, head) for layer in piece.layers}
    stream = sum(
        (s.rows() if each.side is not None else s.samples_of) * each.numbers / s.ways
        / (1 if each.side is None else s.size(each.side) * s.further(plan.other(each.side), each.always))
        for each in piece.handed
    ) * s.item  # fmt: skip
    most = passing(piece, s, lambda layer: kept[layer.name], head, 0.0 if head is not None else stream)
    found = nothing if head is None else head.found
    activations = sum(kept.values(), start=nothing)
    inside = sum((_inside(layer, s) for layer in piece.layers if isinstance(layer, plan.Attention)), start=nothing)
    return Room(*owned, *shared, activations, inside, found, noted, *most, gathered, largest)


def _added(first: tuple[Any, Any, Any], second: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    return first[0] + second[0], first[1] + second[1], first[2] + second[2]


def joined(piece: plan.Piece, s: Settings) -> Joined | None:
    """Where the head is computed together with its loss (`parallel.head`): nothing to sum over, and no gather in a backward."""
    for layer in piece.layers:
        if isinstance(layer, plan.Linear) and layer.with_loss:
            whole = (s.size(layer.k_axis) == 1) & ((s.z == 1) | (s.weights == REPLICATED))
            gathered_again = (s.size(layer.n_axis) > 1) & s.sharded & s.regathered
            return Joined(
                np.asarray(whole & (1 - gathered_again)),
                s.rows() * layer.k / s.size(layer.k_axis) * s.item,
                layer.k * layer.n / s.size("x", "y") * s.gradient * s.ways,
            )
    return None


def saved(layer: plan.Any, s: Settings, joined: Joined | None = None) -> Any:
    """Bytes that a layer keeps from its forward to its backward. A head `joined` with its loss keeps both its gradients."""
    apart = 1 if joined is None else 1 - joined.where
    match layer:
        case plan.Linear():
            whole = s.rows(layer.pixels[0] if layer.pixels else None) * layer.k / s.size(layer.k_axis) * s.item
            shard = (s.sharded | layer.always_in) & s.regathered
            kept = whole / choose(shard, s.size(layer.n_axis), 1)
            return kept if joined is None or not layer.with_loss else kept * apart + joined.found
        case plan.Norm():
            rows = s.rows() / s.further("y", layer.always)
            # Whole features: the input, or for RMSNorm, which torch composes, two steps in float32. Cut ones: what it was
            # normalised to, and once more where that is not float32 itself.
            alone = s.item if layer.centred else 2 * s.statistic
            each = choose(s.x > 1, s.item if s.item >= 4 else 2 * s.item, alone)
            return rows * (layer.features / s.x * each + 2 * s.statistic)
        case plan.Pointwise():
            return at_rest(layer, s) * layer.kept * s.item
        case plan.Attention():
            return _attention(layer, s)
        case plan.Embedding():
            return 9 * s.rows()  # index and mask
        case plan.Table():
            return 9 * s.rows() / s.further("y")
        case plan.Loss():
            rows = s.rows() / s.x
            return rows * (layer.classes / s.y * s.statistic * apart + 10) if not layer.whole else 0.0
        case plan.Edge():
            samples = s.samples_of / s.further(plan.other(layer.side), layer.kind == "stay")
            k = layer.k if layer.kind == "slice" else layer.k / s.size(layer.side)
            return samples * layer.pixels[0] * k * s.item
        case plan.ImageNorm(groups=int()):
            numbers = own_samples(layer.side, s) * layer.pixels * layer.features / s.size(layer.side)
            return numbers * choose(whole_groups(layer, s), s.item, s.statistic + s.item)
        case plan.Whole():
            return s.samples_of * layer.k * s.item
    return 0.0


def _attention(layer: plan.Attention, s: Settings) -> Any:
    """Queries, keys and values where they were projected to, and what is inside."""
    rows = s.rows(layer.length) / s.size("x", "y")
    return rows * (layer.heads + 2 * layer.kv_heads) * layer.head_dim * s.item + _inside(layer, s)


def _inside(layer: plan.Attention, s: Settings) -> Any:
    """What is copied from queries, keys and values, the logarithms of sums, and the output."""
    rows = s.rows(layer.length) / s.size("x", "y")
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    numbers = 0
    if layer.rotary:
        numbers += queries + keys
    if layer.heads != layer.kv_heads:
        numbers += queries  # those of one key do not lie in one run
    # The output is the next linear's input, unless that is gathered and kept so.
    copied = (s.size(plan.other(layer.head_axis)) > 1) & (1 - s.regathered)
    return rows * (numbers * s.item + queries * s.item * copied + 4 * layer.heads)
