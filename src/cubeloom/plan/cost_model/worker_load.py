"""The load of a worker in a step: its part of the model, with its time and memory, from those of the pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cubeloom.parallel.config import KEPT, ParallelConfig
from cubeloom.plan.cost_model.memory import PieceMemory
from cubeloom.plan.cost_model.schedules import ScheduleModel
from cubeloom.plan.cost_model.timing import Times
from cubeloom.plan.model.model import Model

Row = tuple[float, ...]  # numbers of pieces of each kind
BUCKET = 25 * 2**20  # bytes of gradients reduced in one message: `parallel.buckets`


@dataclass(frozen=True)
class Load:
    """A worker's part of the model, in pieces of each kind. Workers with equal loads count as one."""

    passed: Row  # pieces that one micro-batch passes, as the mean over the worker's replicas
    held: Row  # pieces whose weights it holds
    first: int  # the worker among them with the most micro-batches in flight


def loads(model: Model, shape: ScheduleModel, workers: int) -> tuple[Load, ...]:
    return _loads(model.stages(workers * shape.chunks), shape, workers)


@cache
def _loads(stages: tuple[tuple[int, ...], ...], shape: ScheduleModel, workers: int) -> tuple[Load, ...]:
    found: dict[tuple[Row, Row], int] = {}
    most: dict[tuple[Row, Row], float] = {}
    for worker in range(workers):
        own = [stages[stage] for stage in shape.stages(workers, worker)]
        copies = len(own) // shape.chunks
        total = tuple(float(sum(column)) for column in zip(*own, strict=True))
        key = (tuple(each / copies for each in total), total)
        flying = float(np.max(shape.in_flight(workers, np.asarray(2.0 * workers), worker)))
        # With split backwards the last of them has deferred most weight gradients.
        if key not in found or flying > most[key] or (shape.split and flying == most[key]):
            found[key], most[key] = worker, flying
    return tuple(Load(passed, held, worker) for (passed, held), worker in found.items())


@dataclass(frozen=True)
class Pieces:
    """The times and memory of each kind of piece, and the tensors between stages: arrays over the settings."""

    settings: ParallelConfig
    times: Sequence[Times]
    rooms: Sequence[PieceMemory]
    handed: Any  # bytes
    owner: int | None = None  # the kind of piece whose weight another shares
    blocks: tuple[bool, ...] = ()  # whether each can be recomputed


class WorkerLoad(NamedTuple):
    """A worker's computation for a micro-batch, in seconds, and its memory, in bytes. The same for many schedules."""

    times: Times  # of its passes, including the gathers of its first weights, which no computation hides
    numbers: Any  # elements of parameters
    weights: Any  # their bytes
    gradients: Any  # bytes of their gradients
    states: Any  # parameters whose optimizer states it keeps if those are sharded over all replicas
    updating: Any  # bytes besides weights and states after the last backward
    activations: Any
    inside: Any
    found: Any
    noted: Any
    in_backward: Any  # the most beyond activations
    most: Any  # the same in a forward or a backward
    adding: Any  # in a backward that adds to earlier gradients
    most_adding: Any
    given: Any  # of the activations, what is kept if blocks are recomputed
    redoing: Any  # the most beyond it in such a backward, with the activations of a block
    redoing_first: Any  # in the first one, in which the gradient of a head is new
    at_end: Any  # the most at the end of a backward
    redoing_at_end: Any
    pair: Any  # elements of the two largest parts that are updated one after the other
    largest: Any  # the largest gradient reduce-scattered along z, while it is whole
    gathered: Any  # weights that are kept
    handed: Any

    def take(self, index: Any, held: Any = None) -> WorkerLoad:
        """Some of it; what is held stands at other places where it is the same for several of the times."""
        times, *rest = self
        held = index if held is None else held
        return WorkerLoad(Times(*(_at(each, index) for each in times)), *(_at(each, held) for each in rest))


def _at(values: Any, index: Any) -> Any:
    return values[index] if np.ndim(values) else values


def carry(loads: Sequence[Load], pieces: Pieces) -> tuple[WorkerLoad, ...]:
    return tuple(_carried(load, pieces) for load in loads)


def _carried(load: Load, pieces: Pieces) -> WorkerLoad:
    times = Times(*(weighted(load.passed, [getattr(time, name) for time in pieces.times]) for name in Times._fields))
    rooms = {name: [getattr(room, name) for room in pieces.rooms] for name in PieceMemory._fields}
    some = [place for place, count in enumerate(load.held) if count]
    first, final = some[0], some[-1]
    last = len(load.held) - 1
    numbers, states, alone = _numbers(load, pieces, last)
    ends = [last] if load.held[last] else []
    behind = rooms["activations"][last] if ends else 0.0  # do not exist while other pieces are computed
    rank_stride = [place for place in some if 0 < place < last] or some

    def most(way: str) -> Any:
        places = dict.fromkeys([*rank_stride, *ends])
        return most_of([rooms[way][place] - (0.0 if place == last else behind) for place in places])

    kept = weighted(load.held, rooms["gathered"]) * (pieces.settings.weights == KEPT)
    activations, found = (weighted(load.passed, rooms[name]) for name in ("activations", "found"))
    forward, backward, adding = (most(way) for way in ("forward", "backward", "adding"))
    s, item = pieces.settings, pieces.settings.item
    ending = rooms["adding"][first] + rooms["activations"][first]
    redone = _redone(load, pieces, behind, backward, adding, ending)
    return WorkerLoad(
        times=times._replace(
            forward=times.forward + pieces.times[first].first,
            input_grad=times.input_grad + pieces.times[final].last,
            redone=times.redone + pieces.times[final].last,
        ),
        numbers=numbers,
        weights=numbers * item,
        gradients=numbers * s.gradient,
        states=states,
        updating=updating(numbers, alone, states, item, s.gradient),
        activations=activations,
        found=found,
        given=weighted(load.passed, rooms["given"]),
        inside=weighted(load.passed, rooms["inside"]),
        noted=weighted(load.passed, rooms["noted"]),
        in_backward=backward,
        most=np.maximum(forward, backward),
        adding=adding,
        most_adding=np.maximum(forward, adding),
        redoing=redone[0],
        redoing_first=redone[1],
        at_end=ending,
        redoing_at_end=redone[2],
        pair=most_of([rooms["pair"][place] for place in some]),
        largest=most_of([rooms["largest"][place] for place in some]) * (s.gradient / item) * s.gathers,
        gathered=kept,
        handed=pieces.handed,
    )


def _redone(load: Load, pieces: Pieces, behind: Any, backward: Any, adding: Any, ending: Any) -> tuple[Any, Any, Any]:
    """The most beyond what is kept while blocks are recomputed: in any backward, in the first, and at its end."""
    rooms, item = pieces.rooms, pieces.settings.gradient
    some = [place for place, count in enumerate(load.held) if count]
    blocks = [place for place in some if pieces.blocks[place]]
    if not blocks:
        return adding, backward, ending
    inside = {place: rooms[place].activations - rooms[place].given for place in blocks}
    most, most_adding = (
        most_of([inside[place] + getattr(rooms[place], way) for place in blocks]) - behind
        for way in ("again", "again_adding")
    )
    # In the first backward the gradient of a head is new, and in the last block all gradients but earlier ones exist.
    last = len(load.held) - 1
    head = (rooms[last].parameters + rooms[last].shared) * item if load.held[last] else 0.0
    lacking = sum(rooms[place].parameters * item for place in {some[0], blocks[0]})
    at_end = rooms[blocks[0]].activations + rooms[blocks[0]].again - lacking
    return np.maximum(most_adding, adding), np.maximum(most + head, backward), np.maximum(at_end, ending)


def _numbers(load: Load, pieces: Pieces, last: int) -> tuple[Any, Any, Any]:
    """Parameters, those whose states are kept, and those without replicas."""
    rooms, owner = pieces.rooms, pieces.owner
    own = [weighted(load.held, [room[place] for room in rooms]) for place in range(3)]
    if owner is not None and not (load.held[owner] and load.held[last]):
        shared = rooms[last][3:6]
        if load.held[last]:
            own = [first + second for first, second in zip(own, shared, strict=True)]
        if load.held[owner] or load.held[last]:
            # Another worker uses the weight too: they reduce its gradient, and each keeps half of its states.
            own[1], own[2] = own[1] - shared[1] / 2, own[2] - shared[2]
    return own[0], own[1], own[2]


def weighted(row: Row, values: Sequence[Any]) -> Any:
    return sum((count * value for count, value in zip(row, values, strict=True) if count), start=np.float64(0))


def most_of(values: Sequence[Any]) -> Any:
    found = values[0]
    for value in values[1:]:
        found = np.maximum(found, value)
    return found


def updating(numbers: Any, alone: Any, states: Any, item: int, gradient: int) -> Any:
    """Bytes of `numbers` parameters, of which `alone` have no replicas and `states` are this rank's part."""
    wide = max(item, 4)  # gradients become float32, as do the weights that the optimizer updates
    summed, own = numbers - alone, states - alone
    # Each bucket is copied together before it is sent; most ranks' parts have memory already when the last one is.
    copied = np.minimum(summed * gradient, BUCKET) * (1 - own / np.maximum(summed, 1))
    reducing = (numbers + own) * gradient + copied
    stepping = alone * wide + own * (wide + item) + summed * item  # and the gathered weights
    return np.maximum(reducing, stepping)
