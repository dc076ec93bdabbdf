"""The closed form of a whole step: its time and its memory, from those of the pieces, for a schedule and arrays of settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cubeloom.plan import costs
from cubeloom.plan.closed.compute import optimizer
from cubeloom.plan.closed.memory import Room
from cubeloom.plan.closed.schedules import Shape
from cubeloom.plan.closed.settings import KEPT, REPLICATED, Recompute, Settings
from cubeloom.plan.closed.timing import Times
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.model.layers import Model

Row = tuple[float, ...]  # pieces of each kind


@dataclass(frozen=True)
class Load:
    """What a worker has of the model, in pieces of each kind. Workers with the same are one."""

    passed: Row  # that one micro-batch goes through, in the mean over the replicas that the worker holds
    held: Row  # whose weights it holds
    first: int  # the worker among them with the most in flight


def loads(model: Model, shape: Shape, workers: int) -> tuple[Load, ...]:
    return _loads(model.stages(workers * shape.chunks), shape, workers)


@cache
def _loads(stages: tuple[tuple[int, ...], ...], shape: Shape, workers: int) -> tuple[Load, ...]:
    found: dict[tuple[Row, Row], int] = {}
    most: dict[tuple[Row, Row], float] = {}
    for worker in range(workers):
        own = [stages[stage] for stage in shape.stages(workers, worker)]
        copies = len(own) // shape.chunks
        total = tuple(float(sum(column)) for column in zip(*own, strict=True))
        key = (tuple(each / copies for each in total), total)
        flying = float(np.max(shape.in_flight(workers, np.asarray(2.0 * workers), worker)))
        # Where backwards are split the last of them has put off most weight gradients.
        if key not in found or flying > most[key] or (shape.split and flying == most[key]):
            found[key], most[key] = worker, flying
    return tuple(Load(passed, held, worker) for (passed, held), worker in found.items())


@dataclass(frozen=True)
class Pieces:
    """Of each kind of piece, its times and its room; and what stages hand on: arrays over the settings."""

    settings: Settings
    times: Sequence[Times]
    rooms: Sequence[Room]
    handed: Any  # bytes
    owner: int | None = None  # the kind of piece whose weight another shares


class Carried(NamedTuple):
    """What one worker has to compute for a micro-batch, in seconds, and to hold, in bytes. The same for many schedules."""

    forward: Any
    input_grad: Any
    weight_grad: Any
    saved: Any
    computed: Any
    again: Any
    attention: Any
    numbers: Any  # parameters
    weights: Any  # the same in bytes
    states: Any  # parameters that it keeps optimizer states of if those are cut over all replicas
    updating: Any  # beside weights and states, after the last backward
    activations: Any
    inside: Any
    found: Any
    noted: Any
    in_backward: Any  # the most beyond activations
    most: Any  # the same in a forward or a backward
    redoing: Any  # the most in a backward that computes activations again, with them
    most_redoing: Any
    at_end: Any  # the most as a backward ends
    largest: Any  # weight
    gathered: Any  # weights that are kept
    handed: Any

    def take(self, index: Any) -> Carried:
        return Carried(*(each[index] if np.ndim(each) else each for each in self))


def carry(loads: Sequence[Load], pieces: Pieces) -> tuple[Carried, ...]:
    return tuple(_carried(load, pieces) for load in loads)


def _carried(load: Load, pieces: Pieces) -> Carried:
    times = Times(*(weighted(load.passed, [getattr(time, name) for time in pieces.times]) for name in Times._fields))
    rooms = {name: [getattr(room, name) for room in pieces.rooms] for name in Room._fields}
    some = [place for place, count in enumerate(load.held) if count]
    first, final = some[0], some[-1]
    last = len(load.held) - 1
    numbers, states, alone = _numbers(load, pieces, last)
    ends = [last] if load.held[last] else []
    behind = rooms["activations"][last] if ends else 0.0  # not there yet, or gone, while others are computed
    inner = [place for place in some if 0 < place < last] or some

    def most(way: str) -> Any:
        places = dict.fromkeys([*inner, *ends])
        return _largest([rooms[way][place] - (0.0 if place == last else behind) for place in places])

    kept = weighted(load.held, rooms["gathered"]) * (pieces.settings.weights == KEPT)
    activations, found = (weighted(load.passed, rooms[name]) for name in ("activations", "found"))
    forward, backward, again = (most(way) for way in ("forward", "backward", "again"))
    s, item = pieces.settings, pieces.settings.item
    # A head that found its gradients is done before anything is computed again.
    inside = activations - found - behind + _largest([rooms["backward"][place] for place in inner])
    one = np.maximum(inside, np.where(found > 0, backward, activations + np.maximum(backward, again)))
    # Of several strands the first has used what it found when the last is computed again.
    several = activations - found - found / s.ways + np.maximum(backward, again)
    redoing = np.where(s.ways > 1, several, one)
    return Carried(
        forward=times.forward + pieces.times[first].first,
        input_grad=times.input_grad + pieces.times[final].last,
        weight_grad=times.weight_grad,
        saved=times.saved,
        computed=times.computed,
        again=times.again,
        attention=times.attention,
        numbers=numbers,
        weights=numbers * item,
        states=states,
        updating=updating(numbers * item, alone, states, item),
        activations=activations,
        found=found,
        inside=weighted(load.passed, rooms["inside"]),
        noted=weighted(load.passed, rooms["noted"]),
        in_backward=backward,
        most=np.maximum(forward, backward),
        redoing=redoing,
        most_redoing=np.maximum(forward, redoing),
        at_end=rooms["backward"][first] + rooms["activations"][first],
        largest=_largest([rooms["largest"][place] for place in some]),
        gathered=kept,
        handed=pieces.handed,
    )


def _numbers(load: Load, pieces: Pieces, last: int) -> tuple[Any, Any, Any]:
    """Parameters, what states are kept of, and those that are nobody else's."""
    rooms, owner = pieces.rooms, pieces.owner
    own = [weighted(load.held, [room[place] for room in rooms]) for place in range(3)]
    if owner is not None and not (load.held[owner] and load.held[last]):
        shared = rooms[last][3:6]
        if load.held[last]:
            own = [first + second for first, second in zip(own, shared, strict=True)]
        if load.held[owner] or load.held[last]:
            # Another worker uses the weight too: they sum its gradient, and each keeps half of its states.
            own[1], own[2] = own[1] - shared[1] / 2, own[2] - shared[2]
    return own[0], own[1], own[2]


def weighted(row: Row, values: Sequence[Any]) -> Any:
    return sum((count * value for count, value in zip(row, values, strict=True) if count), start=np.float64(0))


def _largest(values: Sequence[Any]) -> Any:
    found = values[0]
    for value in values[1:]:
        found = np.maximum(found, value)
    return found


class Memory(NamedTuple):
    """Bytes of a rank, by class."""

    parameters: Any
    gradients: Any
    optimizer: Any
    activations: Any
    gathered: Any
    buffers: Any
    update: Any  # what the rest of the step needs more than that: gradients, their sums, the optimizer

    @property
    def total(self) -> Any:
        return sum(self, start=np.float64(0))


def memory(shape: Shape, workers: int, worker: int, count: Any, c: Carried, item: int, recompute: Recompute) -> Memory:
    """Of one worker, with `count` micro-batches, while most of them are in flight; and what later moments need more.

    Optimizer states are cut over all replicas (ZeRO-1), which moves no byte more.
    """
    flying = shape.in_flight(workers, count, worker)
    wholly = recompute is True
    least = c.found if wholly else c.activations - c.inside if recompute else c.activations
    if workers > 1:
        # A stage keeps its output for its backward; its input is its first layer's, unless that is to be computed again.
        least = least + c.handed * (shape.chunks * (2 if wholly else 1))
    kept = flying * least
    if shape.split:
        # What waits for its weight gradient keeps inputs and output gradients.
        kept = kept + np.minimum(_waiting(shape, worker), flying - 1) * (c.noted - least)
    backward, most = (c.redoing, c.most_redoing) if wholly else (c.in_backward, c.most)
    there = np.where(np.asarray(count) > flying, c.weights, 0.0)  # gradients, while all are in flight
    # After a backward of each copy of a stage all gradients are there: in the next one, or as a single one ends.
    ending = np.where(np.asarray(count) > shape.replicas, backward, c.at_end)
    later = kept - shape.replicas * least + c.weights + ending
    if shape.split:
        left, off = _put_off(shape, workers, worker, count)
        later = np.maximum(later, left * least + off * c.noted + c.weights + 2 * c.largest)
    buffers = most + 2 * c.handed if workers > 1 else most
    later = np.maximum(later, _updating(shape, c, item) - (c.gathered + (buffers - most)))
    update = np.maximum(0.0, later - (kept + there + most))
    state = 12 if item < 4 else 2 * item  # two states; in half precision a float32 weight too
    return Memory(c.weights, there, c.states * (state / shape.replicas), kept, c.gathered, buffers, update)


def _waiting(shape: Shape, worker: int) -> int:
    """Of the micro-batches in flight, those whose weight gradients were put off, when most are in flight."""
    return {"zb-h1": worker, "zb-h2": 2 * worker}.get(shape.name, 0)


def _put_off(shape: Shape, workers: int, worker: int, count: Any) -> tuple[Any, Any]:
    """When most weight gradients are put off: micro-batches before their backward, and those between its halves."""
    inward = min(worker, workers - 1 - worker) + 1
    left, off = {
        "zb-h1": (workers - 1 - worker, worker + 1),
        "zb-h2": (2 * (workers - 1 - worker), 2 * worker + 1),
        "zbv": ((workers - 1 - worker) / 2, worker + 0.5),
        "dualpipe": (0, inward),
        "dualpipev": ((workers - 1 - worker) / 2, (worker + 1) / 2),
        "chimera-zb": (0, workers),
    }.get(shape.name, (0, 0))
    off = np.minimum(off, count)
    return np.minimum(left, count - off), off


def _updating(shape: Shape, c: Carried, item: int) -> Any:
    """The most bytes beside weights and states after the last backward: of gradients, their sums, and gathered weights."""
    return c.updating if shape.replicas == 1 else updating(c.weights, 0.0, c.states / shape.replicas, item)


def updating(weights: Any, alone: Any, states: Any, item: int) -> Any:
    """Of weights in bytes; of them `alone` are nobody else's; `states` are this rank's part. Those two in numbers."""
    wide = max(item, 4)  # gradients become float32, as the weights that the optimizer changes
    summed, own = weights - alone * item, states - alone
    reducing = weights + own * item
    stepping = alone * (item + (4 if item < 4 else 0)) + own * (wide + item)
    return summed + np.maximum(reducing, stepping)


def passes(shape: Shape, c: Carried, recompute: Recompute) -> tuple[Any, Any, Any]:
    """Seconds of a forward, of an input gradient and of a weight gradient, as the schedule runs them."""
    i = c.input_grad
    if recompute:
        i = i + (c.attention if recompute == "attention" else c.again)
    return c.forward, i if shape.split else i - c.saved, c.weight_grad


def pipelined(shape: Shape, workers: int, count: Any, f: Any, i: Any, w: Any) -> Any:
    """Seconds of the pipeline without messages: what a worker computes and waits for; at least one micro-batch alone."""
    alone = workers * (f + i) + (w if shape.split else workers * w)
    return np.maximum(count * (f + i + w) + shape.bubble(workers, count, f, i, w), alone)


class Step(NamedTuple):
    """Seconds. `computed`, `bubble` and `exposed` make the step."""

    seconds: Any
    computed: Any
    bubble: Any
    exposed: Any
    message: Any
    reduction: Any  # of gradients: each rank gets the sum of its share
    update: Any  # of that share, and the gather of all shares


def step(
    shape: Shape,
    workers: int,
    count: Any,
    carried: Sequence[Carried],
    s: Settings,
    cluster: Cluster,
    recompute: Recompute,
) -> Step:
    """Chimera's equation 1, for every schedule: the busiest worker's passes, the bubble, messages, the sum of gradients."""
    f, i, w, computed = busiest(shape, carried, recompute)
    numbers = _largest([c.numbers for c in carried])
    message, reduction, gather = network(shape, workers, carried[0].handed, numbers, s, cluster)
    # Replicas update a share of their weights each (ZeRO-1).
    own_share = optimizer(_largest([c.states for c in carried]) / shape.replicas, s.item, cluster.device)
    update = own_share + gather
    pipeline = pipelined(shape, workers, count, f, i, w)
    total = pipeline + shape.messages(workers, count) * message + reduction + update
    own = count * computed + own_share
    bubble = pipeline - count * (f + i + w)
    return Step(total, own, bubble, total - own - bubble, message, reduction, update)


def busiest(shape: Shape, carried: Sequence[Carried], recompute: Recompute) -> tuple[Any, Any, Any, Any]:
    """Forward, input gradient, weight gradient, and what is computed of them, of the worker that has most to do."""
    worst: list[Any] = []
    for c in carried:
        here = [*passes(shape, c, recompute), c.computed]
        if worst:
            more = here[0] + here[1] + here[2] > worst[0] + worst[1] + worst[2]
            here = [np.where(more, new, old) for new, old in zip(here, worst, strict=True)]
        worst = here
    f, i, w, computed = worst
    return f, i, w, computed


def network(
    shape: Shape, workers: int, handed: Any, numbers: Any, s: Settings, cluster: Cluster
) -> tuple[Any, Any, Any]:
    """Seconds of a message between stages, of the sum of a worker's gradients, and of the gather of its updated weights."""
    message = costs.send(cluster, handed, workers, s.inner["pipe"]) if workers > 1 else 0.0 * handed
    nbytes, (group, inner) = numbers * s.item, replicas(shape, s)
    return (
        message,
        costs.reduce_scatter(cluster, nbytes, group, inner),
        costs.all_gather(cluster, nbytes, group, inner),
    )


def replicas(shape: Shape, s: Settings) -> tuple[Any, Any]:
    """How many ranks sum the gradients of a weight, and how far apart they lie."""
    z = np.where(s.weights == REPLICATED, s.z, 1)
    inner = np.where(z > 1, s.inner["z"], np.where(np.asarray(s.data) > 1, s.inner["data"], s.inner["pipe"]))
    return s.data * z * shape.replicas, inner
