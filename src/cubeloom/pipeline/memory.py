"""Memory over time: activations from forward to weight gradient, and the weights of replicas and older versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cubeloom.pipeline.action import Action, Kind
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.schedule import Row, Schedule, Updates

Curve = tuple[tuple[float, float], ...]  # (time, level from then on)
Timed = Sequence[tuple[Action, float, float]]  # actions with start and end, in the order of their worker


def peak(curve: Curve) -> float:
    return max((level for _, level in curve), default=0.0)


def activations(timed: Timed, costs: Costs) -> Curve:
    """A forward allocates its activations when it starts; the weight gradient frees them when it ends.

    A stage that recomputes keeps only its input in between, and allocates its activations again when its backward
    starts.
    """
    changes: list[tuple[float, float]] = []
    for action, start, end in timed:
        room = costs.activation[action.stage] * action.size
        spared = room * (1 - costs.boundary) if action.stage in costs.recompute else 0.0
        if action.kind is Kind.FORWARD:
            changes += [(start, room), (end, -spared)]
        if action.makes_input_grad:
            changes.append((start, spared))
        if action.makes_weight_grad:
            changes.append((end, -room))
    return _levels(changes)


def in_flight(row: Row, room: Sequence[float] | None = None) -> float:
    """The most micro-batches whose activations the worker holds at once, weighted with `room` of their stage."""
    held = most = 0.0
    for action in row:
        size = action.size * (room[action.stage] if room else 1.0)
        if action.kind is Kind.FORWARD:
            held += size
            most = max(most, held)
        elif action.makes_weight_grad:
            held -= size
    return most


def versions(schedule: Schedule, worker: int) -> dict[tuple[int, int, int], int]:
    """The weight version that (replica, stage, micro-batch) uses, from forward to backward; 0 at the start of the
    stream.

    Update u of a stage creates version u + 1. The newest version is the last one that the row has created. `PREVIOUS`
    is the rule of PipeDream-2BW: group g, the micro-batches between two updates, uses version g - 1; the first two
    groups use 0.
    """
    made: dict[tuple[int, int], int] = {}
    used = {}
    for action in schedule.workers[worker]:
        home = (action.replica, action.stage)
        if action.kind is Kind.UPDATE:
            made[home] = made.get(home, 0) + 1
        elif action.kind is Kind.FORWARD:
            newest = made.get(home, 0)
            if schedule.updates is Updates.PREVIOUS:
                used[*home, action.microbatch] = max(0, schedule.groups[action.microbatch] - 1)
            else:
                used[*home, action.microbatch] = newest
    return used


def weights(schedule: Schedule, worker: int, timed: Timed, costs: Costs) -> Curve:
    """Each stage's newest version, and every older one until the last backward that uses it.

    Under `PREVIOUS` the version before the newest is kept too: the next group may still start with it.
    """
    changes = [(0.0, costs.weights[stage]) for _, stage in schedule.held_by(worker)]
    used = versions(schedule, worker)
    lives: dict[tuple[int, int], list[float]] = {home: [0.0] for home in schedule.held_by(worker)}
    last_use: dict[tuple[int, int, int], float] = {}
    for action, _, end in timed:
        home = (action.replica, action.stage)
        if action.kind is Kind.UPDATE:
            lives[home].append(end)
        elif action.makes_weight_grad:
            last_use[*home, used[*home, action.microbatch]] = end
    for home, births in lives.items():
        for version, birth in enumerate(births[1:], start=1):
            # The previous version is kept beside this one until its last use.
            until = last_use.get((*home, version - 1), birth)
            size = costs.weights[home[1]]
            if schedule.updates is Updates.PREVIOUS and version + 1 < len(births):
                until = max(until, births[version])
            changes += [(birth, size), (max(birth, until), -size)]
    return _levels(sorted(changes))  # at one instant, old versions are freed before new ones are created


def _levels(changes: Iterable[tuple[float, float]]) -> Curve:
    level = 0.0
    curve = []
    for time, change in changes:
        if change:
            level += change
            curve.append((time, level))
    return tuple(curve)
