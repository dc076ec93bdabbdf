"""Bytes that a rank holds: parameters and their states for good, activations from forward to backward, and what comes and goes.

Activations are those that the layers of `cubeloom.cube` keep for their backward, tensor by tensor. Left out are what lies
below tensors: the allocator's rounding, workspaces of libraries, and buffers of communicators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cubeloom.plan.closed.compute import at_rest
from cubeloom.plan.closed.images import own_samples, whole_groups
from cubeloom.plan.closed.layer import parameters
from cubeloom.plan.closed.settings import KEPT, REPLICATED, Settings, choose
from cubeloom.plan.model import layers as plan

CHUNK = 2**28  # bytes of logits that a head and its loss compute at a time: `cube.head`


class Room(NamedTuple):
    """Of one piece."""

    parameters: Any  # numbers of a rank, without a weight that another piece owns
    states: Any  # of them, what a rank keeps optimizer states of if those are cut over replicas
    shared: Any  # numbers of a weight that another piece owns
    shared_states: Any
    activations: Any  # bytes that one micro-batch keeps
    inside: Any  # of them, what is inside attention
    noted: Any  # bytes of output gradients that a put-off weight gradient needs
    passing: Any  # bytes of its largest gathered tensors and gradients, while it is computed
    gathered: Any  # bytes of all its gathered weights
    largest: Any  # of its largest weight, whole along z


def room(piece: plan.Piece, s: Settings) -> Room:
    nothing: Any = np.float64(0)
    numbers = states = shared = shared_states = gathered = largest = passing = noted = nothing
    for layer in piece.layers:
        for each in parameters(layer, s):
            own = each.numbers * each.exists
            if each.name == f"{getattr(layer, 'shares', None)}.weight":
                shared, shared_states = shared + own, shared_states + own / s.size(*each.axes)
            else:
                numbers, states = numbers + own, states + own / s.size(*each.axes)
        if isinstance(layer, plan.Linear):
            whole = layer.k * layer.n * layer.taps / s.size("x", "y") * s.item
            gathered = gathered + whole * s.weights_cut * (s.z > 1)
            largest = np.maximum(largest, whole)
            out = s.rows(layer.pixels[1] if layer.pixels else None)
            noted = noted + out * layer.n / s.size(layer.n_axis) * s.item
        passing = np.maximum(passing, _passing(layer, s, joined(piece, s)))
    kept = sum((saved(layer, s, joined(piece, s)) for layer in piece.layers), start=np.float64(0))
    inside = sum(
        (_inside(layer, s) for layer in piece.layers if isinstance(layer, plan.Attention)), start=np.float64(0)
    )
    return Room(numbers, states, shared, shared_states, kept, inside, noted, passing, gathered, largest)


def joined(piece: plan.Piece, s: Settings) -> Any:
    """Where the head is computed together with its loss (`cube.head`): nothing to sum over, and no gather in a backward."""
    for layer in piece.layers:
        if isinstance(layer, plan.Linear) and layer.with_loss:
            whole = (s.size(layer.k_axis) == 1) & ((s.z == 1) | (s.weights == REPLICATED))
            gathered_again = (s.size(layer.n_axis) > 1) & s.sharded & s.regathered
            return whole & (1 - gathered_again)
    return False


def saved(layer: plan.Any, s: Settings, joined: Any = False) -> Any:
    """Bytes that a layer keeps from its forward to its backward. A head `joined` with its loss keeps both its gradients."""
    match layer:
        case plan.Linear():
            whole = s.rows(layer.pixels[0] if layer.pixels else None) * layer.k / s.size(layer.k_axis) * s.item
            shard = (s.sharded | layer.always_in) & s.regathered
            gradient = layer.k * layer.n / s.size("x", "y") * s.item * joined if layer.with_loss else 0.0
            return whole / choose(shard, s.size(layer.n_axis), 1) + gradient
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
            return rows * (layer.classes / s.y * s.statistic * (1 - joined) + 10) if not layer.whole else 0.0
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
    # The output is the next linear's input, unless that is gathered.
    across = s.size(plan.other(layer.head_axis))
    return rows * (numbers * s.item + queries * s.item * (across > 1) + 4 * layer.heads)


def _passing(layer: plan.Any, s: Settings, joined: Any) -> Any:
    """What lives while the layer is computed, beside what is kept: gradients of its output and input, whole.

    Most lives where a backward begins, with all activations there: behind the loss, whose logits are there too, shifted and in
    float32.
    """
    match layer:
        case plan.Linear():
            into, out = layer.pixels or (None, None)
            x = s.rows(into) * layer.k / s.size(layer.k_axis)
            y = s.rows(out) * layer.n / s.size(layer.n_axis)
            return (x + y) * s.item * (1 - joined if layer.with_loss else 1)
        case plan.Pointwise():
            return at_rest(layer, s) * (layer.inputs + layer.outputs) * s.item
        case plan.Loss():
            wide = s.statistic if s.item < s.statistic else 0
            logits = s.rows() * layer.classes / s.size("x", "y")
            some = np.minimum(logits, CHUNK / s.item)  # of the logits, at a time
            return choose(joined, some * (s.item + 3 * s.statistic), logits * (s.item + wide + s.statistic))
    return 0.0


def gathered_weights(pieces: Any, s: Settings, largest: Any) -> Any:
    """Of a stage whose gathered weights together are `pieces`: all where they are kept, otherwise one in use and the next."""
    return choose(s.weights == KEPT, pieces, np.minimum(2 * largest, pieces))
