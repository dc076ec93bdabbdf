"""Seconds of one micro-batch on one piece of the model: what it computes, and what of its communication shows.

With one strand, collectives of activations are waited for, but that of an input gradient runs behind the weight gradient;
a weight is gathered while layers compute from the use of the one before it, and its gradient scattered behind, so that what is
longer than that computation shows. With several strands one computes while another communicates, collective by collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.specs import (
    AttentionSpec,
    Collective,
    EmbeddingSpec,
    LayerSpec,
    LinearSpec,
    TableSpec,
    collectives,
    last_linear,
)
from cubeloom.plan import costs
from cubeloom.plan.cost_model.compute import Machine, Seconds, issued, seconds
from cubeloom.plan.hardware import Cluster, Dtype
from cubeloom.plan.model.model import Piece


class Times(NamedTuple):
    """`saved` is what a backward in one takes less than its two halves apart; `computed` what of all that is computation.

    A stage begins with a weight that nothing was computed before: `first` is its gather in a forward, `last` in a backward.
    `redone` and `redone_saved` are the same of an input gradient where the piece's forward is computed once more, if it is a
    block; `recomputed` is what of that forward is computation, and `attention` what attention takes of a forward. `free` is
    what is computed in a backward while no weight travels.
    """

    forward: Any
    input_grad: Any
    weight_grad: Any
    saved: Any
    computed: Any
    redone: Any
    redone_saved: Any
    recomputed: Any
    attention: Any
    first: Any
    last: Any
    free: Any


def times(piece: Piece, s: ParallelConfig, cluster: Cluster, dtype: Dtype) -> Times:
    machine = Machine.of(cluster, dtype)
    compute = [seconds(layer, s, machine) for layer in piece.layers]
    forward, input_grad, weight_grad = (sum(each[phase] for each in compute) for phase in range(3))
    each = [_waits(layer, s, cluster, own) for layer, own in zip(piece.layers, compute, strict=True)]
    waits = {what: sum(one[what] for one in each) for what in each[0]}
    between = _between(piece, compute, each)
    f, i, w, both = _gathering(between, cluster)
    ahead = f
    f, i, both = f + waits["F"], i + waits["I"] + waits["dX"], both + waits["I"]
    woven = np.asarray(s.ways) > 1
    gathers, scatters, drag = waits["weights I"] + waits["W"], waits["weights W"], cluster.nic_drag
    woven_i = _woven(_turns(compute, each, "I"), gathers, s, drag)
    woven_w = costs.together(weight_grad, scatters, drag)
    woven_both = _woven(_turns(compute, each, "B"), gathers + scatters, s, drag)
    i, w, both = np.where(woven, woven_i, i), np.where(woven, woven_w, w), np.where(woven, woven_both, both)
    f = np.where(woven, _woven(_turns(compute, each, "F"), waits["weights F"], s, drag), f)
    redone, redone_both, recomputed = i, both, np.float64(0)
    if piece.block:
        # Weights that were gathered for the forward are there; and what the block ends with is not computed again.
        kept = _gathering([each._replace(gather_before=each.gathered_input) for each in between], cluster)
        ends = [place for place, layer in enumerate(piece.layers) if layer is last_linear(piece.layers)]
        ends = [] if cluster.software.recomputes_last else ends
        recomputed = forward - sum(compute[place].forward for place in ends)
        again = ahead + waits["F"] - sum(compute[place].forward + each[place]["Y"] for place in ends)
        woven_i = _woven(_turns(compute, each, "I"), waits["W"], s, drag)
        woven_both = _woven(_turns(compute, each, "B"), waits["W"] + scatters, s, drag)
        redone = again + np.where(woven, woven_i, kept[1] + waits["I"] + waits["dX"])
        redone_both = again + np.where(woven, woven_both, kept[3] + waits["I"])
    # The host issues ahead of the device: where it is slower all in all, its time is what counts.
    host = issued(sum(own.operators for own in compute), s, machine)
    again_too = 2 if piece.block else 1
    f, i, w = (np.maximum(host, passed) for passed in (f, i, w))
    both, redone = np.maximum(2 * host, both), np.maximum(again_too * host, redone)
    redone_both = np.maximum((1 + again_too) * host, redone_both)
    return Times(
        f,
        i,
        w,
        i + w - both,
        np.maximum(host, forward) + np.maximum(2 * host, input_grad + weight_grad),
        redone,
        redone + w - redone_both,
        recomputed,
        sum(
            (own.forward for layer, own in zip(piece.layers, compute, strict=True) if isinstance(layer, AttentionSpec)),
            start=np.float64(0),
        ),
        each[_first(piece.layers)]["weights F"],
        each[-1 - _first(piece.layers[::-1])]["weights I"],
        np.maximum(0.0, input_grad + weight_grad - gathers - scatters),
    )


class _Between(NamedTuple):
    """From the use of one weight to that of the next: what is computed with it, what follows, and what is gathered meanwhile.

    In a backward the next weight is the one before. Lists end where they begin: pieces of one kind follow each other.
    """

    forward: Any  # with the weight
    followed: Any  # by other layers, in a forward
    result: Any  # seconds of its collective: that stands behind the gather, and what follows behind it
    next_gather: Any
    preceded: Any  # by other layers, in a backward
    gathered: Any  # seconds of the collective of the result's gradient: it stands behind the scatter
    input_grad: Any
    sent: Any  # seconds of the collective of the input gradient, which runs behind the weight gradient
    onward: Any  # other layers' computation, up to the weight before
    gather_before: Any  # and of the input once more, where only its shard was kept
    gathered_input: Any  # of that, the input's
    weight_grad: Any
    scatter_behind: Any


def _between(piece: Piece, compute: Sequence[Seconds], waits: Sequence[dict[str, Any]]) -> list[_Between]:
    starts = [place for place, layer in enumerate(piece.layers) if _has_weight(layer)] or [0]
    ends = [*starts[1:], starts[0] + len(compute)]
    rests = [[place % len(compute) for place in range(start + 1, end)] for start, end in zip(starts, ends, strict=True)]
    found = []
    for number, start in enumerate(starts):
        before, behind = starts[number - 1], starts[(number + 1) % len(starts)]
        found.append(
            _Between(
                forward=compute[start].forward,
                followed=sum(compute[place].forward for place in rests[number]),
                result=waits[start]["Y"],
                next_gather=waits[behind]["weights F"],
                preceded=sum(compute[place].input_grad for place in rests[number]),
                gathered=waits[start]["I"],
                input_grad=compute[start].input_grad,
                sent=waits[start]["dX"],
                onward=sum(compute[place].input_grad + compute[place].weight_grad for place in rests[number - 1]),
                gather_before=waits[before]["weights I"] + waits[start]["W"],
                gathered_input=waits[start]["W"],
                weight_grad=compute[start].weight_grad,
                scatter_behind=waits[behind]["weights W"],
            )
        )
    return found


def _gathering(between: Sequence[_Between], cluster: Cluster) -> tuple[Any, Any, Any, Any]:
    """Seconds of a forward, of both gradients and of a backward in one: a weight is gathered ahead, one scattered behind.

    Collectives go one after another: where one of an activation follows, what is still under way then is waited for too.
    Those of activations are not in it, but the input gradient's in a backward in one, as it may be hidden.
    """
    drag = cluster.nic_drag
    f: Any = np.float64(0)
    i, w, both = f, f, f
    for each in between:
        f = f + _until(each.result, each.forward, each.followed, each.next_gather, drag)
        i = i + _until(each.sent, each.input_grad, each.onward, each.gather_before, drag)
        w = w + costs.together(each.weight_grad, each.scatter_behind, drag)
        apart = np.asarray(each.gathered) > 0
        scattering = np.where(apart, np.maximum(0.0, each.scatter_behind - each.preceded), 0.0)
        queue = each.gather_before + np.where(apart, 0.0, each.scatter_behind)
        late = costs.exposed(each.input_grad, queue, drag) + each.sent
        hiding = each.input_grad + costs.together(each.weight_grad, late, cluster.link_drag) + each.onward
        plain = costs.together(each.input_grad + each.weight_grad + each.onward, queue, drag)
        both = both + scattering + np.where(np.asarray(each.sent) > 0, hiding, plain)
    return f, i, w, both


def _until(collective: Any, computed: Any, then: Any, gather: Any, drag: float) -> Any:
    """Computation beside a gather: all of it, or where a collective stands between its parts the first."""
    cut = costs.together(computed, gather, drag) + then
    return np.where(np.asarray(collective) > 0, cut, costs.together(computed + then, gather, drag))


def _has_weight(layer: Any) -> bool:
    return isinstance(layer, LinearSpec | EmbeddingSpec | TableSpec)


def _first(layers: Sequence[Any]) -> int:
    return next((place for place, layer in enumerate(layers) if _has_weight(layer)), 0)


def _woven(turns: Sequence[tuple[Any, Any]], behind: Any, s: ParallelConfig, drag: float) -> Any:
    """Seconds of strands that take turns: `turns` are of what is computed, and of the collective that follows it.

    While one strand waits for its share of a collective, another computes its own up to that collective, or from there on.
    """
    before = _runs([computed for computed, _ in turns], [took for _, took in turns])
    back = turns[::-1]
    after = _runs([computed for computed, _ in (back[-1], *back[:-1])], [took for _, took in back])
    shown: Any = np.float64(0)
    for (_, took), earlier, later in zip(turns, before, after[::-1], strict=True):
        shown = shown + np.maximum(0.0, took - earlier) + np.maximum(0.0, took - later)
    computed, waited = (sum(turn[which] for turn in turns) for which in range(2))
    return np.maximum(costs.together(computed, behind, drag) + shown / s.ways, waited + behind)


def _runs(computed: Sequence[Any], collectives: Sequence[Any]) -> list[Any]:
    """What is computed since the last collective that there is, up to each one: along an axis of size 1 there is none."""
    found: list[Any] = []
    run: Any = np.float64(0)
    for own, took in zip(computed, collectives, strict=True):
        run = run + own
        found.append(run)
        run = np.where(np.asarray(took) > 0, 0.0, run)
    return found


def _turns(compute: Sequence[Seconds], waits: Sequence[dict[str, Any]], phase: str) -> list[tuple[Any, Any]]:
    """Of a forward, of an input gradient or of both gradients: pairs of computation and a collective behind it."""
    found: list[tuple[Any, Any]] = []
    nothing = np.float64(0)
    for own, took in zip(compute, waits, strict=True):
        if phase == "F":
            found += [(nothing, took["F"] - took["Y"]), (own.forward, took["Y"])]
        else:
            work = own.input_grad + (own.weight_grad if phase == "B" else 0.0)
            found += [(nothing, took["I"]), (work, took["dX"])]
    return found if phase == "F" else [turn for pair in zip(found[-2::-2], found[::-2], strict=True) for turn in pair]


def _waits(layer: LayerSpec, s: ParallelConfig, cluster: Cluster, own: Seconds) -> dict[str, Any]:
    """Seconds of a layer's collectives, by what they can run behind. Those of its result, "Y", are among "F".

    Software that splits products hides a share of each collective behind the product that it belongs to, if that is as long.
    """
    nothing = np.float64(0)
    found: dict[str, Any] = dict.fromkeys(("F", "Y", "I", "dX", "W", "weights F", "weights I", "weights W"), nothing)
    n_axis, k_axis = getattr(layer, "n_axis", None), getattr(layer, "k_axis", None)
    for each in collectives(layer, s):
        what = each.phase if not each.of_weight else f"weights {each.phase}"
        if cluster.software.blocking:
            what = "F" if each.phase == "F" else "I"
        behind = cluster.software.hides_input_gradient and not cluster.software.blocking
        if behind and each.phase == "I" and not each.of_weight and each.axes == (n_axis,):
            what = "dX"
        took = duration(each, s, cluster)
        if not each.of_weight and each.operation != "all_to_all":
            beside = own.forward if each.phase == "F" else own.input_grad
            took = took - np.minimum(cluster.software.hides_tensor * took, beside)
        found[what] = found[what] + took
        if what == "F" and each.axes == (k_axis,):
            found["Y"] = found["Y"] + took
    return found


def duration(move: Collective, s: ParallelConfig, cluster: Cluster) -> Any:
    """Seconds of a collective of one micro-batch: of activations in as many messages as there are strands."""
    group, rank_stride = _whole(s.size(*move.axes)), _whole(_inner(move, s))
    messages = 1 if move.of_weight else s.ways
    nbytes = move.nbytes / messages
    if move.operation == "all_reduce":
        each = costs.all_reduce(cluster, nbytes, group, rank_stride)
    elif move.operation == "all_to_all":
        each = costs.all_to_all(cluster, nbytes, group, rank_stride)
    else:
        each = costs.all_gather(cluster, nbytes, group, rank_stride)
    if not move.of_weight and move.operation != "all_to_all":
        inside = costs.members(group, rank_stride, cluster.devices_per_node) == group
        each = each * np.where(inside, cluster.skew, 1.0)
    return np.where(np.asarray(move.nbytes) > 0, messages * each, 0.0)


def _whole(number: Any) -> Any:
    """As integers, which numpy divides several times faster than floats."""
    return np.asarray(number).astype(np.int64)


def _inner(move: Collective, s: ParallelConfig) -> Any:
    """Of a group over several axes, that of the innermost."""
    rank_stride: Any = None
    for axis in move.axes:
        of_axis = np.where(np.asarray(s.size(axis)) > 1, s.rank_stride[axis], np.inf)
        rank_stride = of_axis if rank_stride is None else np.minimum(rank_stride, of_axis)
    return np.where(np.isfinite(rank_stride), rank_stride, 1.0)
