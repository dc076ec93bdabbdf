"""Seconds of one micro-batch on one piece of the model: what it computes, and what of its communication shows.

With one strand, collectives of activations are waited for, but that of an input gradient runs behind the weight gradient;
weights are gathered ahead and their gradients scattered behind, while layers compute. With several strands one computes while
another communicates, and what shows is the first one's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cubeloom.plan import costs
from cubeloom.plan.closed.compute import Machine, issue, seconds
from cubeloom.plan.closed.layer import moves
from cubeloom.plan.closed.moves import Move
from cubeloom.plan.closed.settings import Settings
from cubeloom.plan.hardware import Cluster, Dtype
from cubeloom.plan.model.layers import Piece


class Times(NamedTuple):
    """`saved` is what a backward in one takes less than its two halves apart; `computed` what of all that is computation."""

    forward: Any
    input_grad: Any
    weight_grad: Any
    saved: Any
    computed: Any


def times(piece: Piece, s: Settings, cluster: Cluster, dtype: Dtype) -> Times:
    machine = Machine(cluster.device, dtype)
    compute = [issue(seconds(layer, s, machine), s, machine) for layer in piece.layers]
    forward, input_grad, weight_grad = (sum(each[phase] for each in compute) for phase in range(3))
    waits = _waits(piece, s, cluster)
    woven = np.asarray(s.ways) > 1
    f = _pass(forward, waits["F"], waits["weights F"], s, cluster, woven)
    i = _pass(input_grad, waits["I"] + waits["dX"], waits["weights I"] + waits["W"], s, cluster, woven)
    w = costs.together(weight_grad, waits["weights W"], cluster.nic_drag)
    hidden = waits["dX"] + weight_grad - costs.together(weight_grad, waits["dX"], cluster.link_drag)
    saved = np.where(woven, 0.0, np.minimum(hidden, waits["dX"]))
    return Times(f, i, w, saved, forward + input_grad + weight_grad)


def _pass(compute: Any, waited: Any, behind: Any, s: Settings, cluster: Cluster, woven: Any) -> Any:
    """Computation, collectives that are waited for, and those behind it."""
    drag = cluster.nic_drag
    plain = costs.together(compute, behind, drag) + waited
    first = np.minimum(compute, waited) / s.ways
    return np.where(woven, costs.together(compute, waited + behind, drag) + first, plain)


def _waits(piece: Piece, s: Settings, cluster: Cluster) -> dict[str, Any]:
    """Seconds of collectives, by what they can run behind."""
    found: dict[str, Any] = dict.fromkeys(("F", "I", "dX", "W", "weights F", "weights I", "weights W"), np.float64(0))
    for layer in piece.layers:
        n_axis = getattr(layer, "n_axis", None)
        for move in moves(layer, s):
            what = move.phase if not move.of_weight else f"weights {move.phase}"
            if move.phase == "I" and not move.of_weight and move.axes == (n_axis,):
                what = "dX"
            found[what] = found[what] + duration(move, s, cluster)
    return found


def duration(move: Move, s: Settings, cluster: Cluster) -> Any:
    """Seconds of a collective of one micro-batch: of activations in as many messages as there are strands."""
    group, inner = _whole(s.size(*move.axes)), _whole(_inner(move, s))
    messages = 1 if move.of_weight else s.ways
    nbytes = move.nbytes / messages
    if move.operation == "all_reduce":
        each = costs.all_reduce(cluster, nbytes, group, inner)
    elif move.operation == "exchange":
        each = costs.all_to_all(cluster, nbytes, group, inner)
    else:
        each = costs.all_gather(cluster, nbytes, group, inner)
    return np.where(np.asarray(move.nbytes) > 0, messages * each, 0.0)


def _whole(number: Any) -> Any:
    """As integers, which numpy divides several times faster than floats."""
    return np.asarray(number).astype(np.int64)


def _inner(move: Move, s: Settings) -> Any:
    """Of a group over several axes, that of the innermost."""
    inner: Any = None
    for axis in move.axes:
        of_axis = np.where(np.asarray(s.size(axis)) > 1, s.inner[axis], np.inf)
        inner = of_axis if inner is None else np.minimum(inner, of_axis)
    return np.where(np.isfinite(inner), inner, 1.0)
