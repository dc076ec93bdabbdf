"""The closed form of a whole step: its time and its memory, from those of the pieces, for a schedule and arrays of settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cubeloom.plan import costs
from cubeloom.plan.closed.compute import optimizer
from cubeloom.plan.closed.memory import Room, gathered_weights
from cubeloom.plan.closed.schedules import Shape
from cubeloom.plan.closed.settings import REPLICATED, Recompute, Settings
from cubeloom.plan.closed.timing import Times
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.model.layers import Model

Row = tuple[float, ...]  # pieces of each kind
BUCKET = 25 * 2**20  # bytes of gradients that are summed in one message: `cube.gradients`


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
        if key not in found or flying > most[key]:
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
    states: Any  # of them, what it keeps optimizer states of if those are cut over all replicas
    activations: Any
    inside: Any
    noted: Any
    passing: Any
    gathered: Any
    largest: Any
    handed: Any

    def take(self, index: Any) -> Carried:
        return Carried(*(each[index] for each in self))


def carry(loads: Sequence[Load], pieces: Pieces) -> tuple[Carried, ...]:
    return tuple(_carried(load, pieces) for load in loads)


def _carried(load: Load, pieces: Pieces) -> Carried:
    times = Times(*(weighted(load.passed, [getattr(time, name) for time in pieces.times]) for name in Times._fields))
    rooms = {name: [getattr(room, name) for room in pieces.rooms] for name in Room._fields}
    some = [place for place, count in enumerate(load.held) if count]
    largest = _largest([rooms["largest"][place] for place in some])
    numbers, states = weighted(load.held, rooms["parameters"]), weighted(load.held, rooms["states"])
    if pieces.owner is not None and not load.held[pieces.owner]:
        numbers = numbers + weighted(load.held, rooms["shared"])
        states = states + weighted(load.held, rooms["shared_states"])
    return Carried(
        forward=times.forward + pieces.times[some[0]].first,
        input_grad=times.input_grad + pieces.times[some[-1]].last,
        weight_grad=times.weight_grad,
        saved=times.saved,
        computed=times.computed,
        again=times.again,
        attention=times.attention,
        numbers=numbers,
        states=states,
        activations=weighted(load.passed, rooms["activations"]),
        inside=weighted(load.passed, rooms["inside"]),
        noted=weighted(load.passed, rooms["noted"]),
        passing=rooms["passing"][some[-1]],  # where its backward begins, with all activations there
        gathered=gathered_weights(weighted(load.held, rooms["gathered"]), pieces.settings, largest),
        largest=largest,
        handed=pieces.handed,
    )


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
    update: Any  # what the optimizer's step needs more than all that is gone by then

    @property
    def total(self) -> Any:
        return sum(self, start=np.float64(0))


def memory(shape: Shape, workers: int, worker: int, count: Any, c: Carried, item: int, recompute: Recompute) -> Memory:
    """Of one worker, with `count` micro-batches, at its peak: as the last forward before a backward ends, or in the update.

    Optimizer states are cut over all replicas (ZeRO-1), which moves no byte more.
    """
    stages = workers * shape.chunks
    flying = shape.in_flight(workers, count, worker)
    ends = 2 * c.handed * shape.chunks * (1 - 1 / stages)  # what a stage was given and what it handed on
    if recompute is True:
        kept = flying * ends + c.activations
    elif recompute == "attention":
        kept = flying * (c.activations - c.inside + ends)
    else:
        kept = flying * (c.activations + ends)
    # A split backward has noted all output gradients before the activations go.
    activations = kept + c.passing + (c.noted if shape.split else 0.0)
    # A weight's gradient is whole before it is added, or scattered while the next is computed; messages have buffers.
    buffers = c.largest * (1 + (c.gathered > 0)) + (2 * c.handed if workers > 1 else 0.0 * c.handed)
    # Two states; in half precision a float32 weight too, and in the optimizer's step a float32 gradient.
    state, more = (12, 4) if item < 4 else (8, 0)
    states, weights = c.states / shape.replicas, c.numbers * item
    # Of a single micro-batch gradients come as activations go.
    gradients = np.where(np.asarray(count) > 1, weights, np.maximum(0.0, weights - activations))
    passing = activations + c.gathered + buffers
    updating = more * states + np.minimum(2 * BUCKET, weights) + weights - gradients
    update = np.maximum(0.0, updating - passing)
    return Memory(weights, gradients, states * state, activations, c.gathered, buffers, update)


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
