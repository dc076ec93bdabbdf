"""Improve an order step by step: exchange neighbours on the critical path while the schedule gets no slower.

The second of two neighbours on the critical path waits only for its worker. Run first, it may let others start sooner.
Exchanging such a pair can never create a cycle of dependencies (the neighbourhood of job-shop scheduling).
"""

from __future__ import annotations

import random
from dataclasses import replace

from cubeloom.pipeline.action import COMPUTE, Action
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.dependencies import makes, needs
from cubeloom.pipeline.memory import in_flight
from cubeloom.pipeline.schedule import Row, Schedule
from cubeloom.pipeline.simulator import Timeline, simulate

_TOLERANCE = 1e-9
_EFFORT = 60_000  # actions that may be re-timed: about a second


def polish(schedule: Schedule, costs: Costs, cap: float, goal: float, tries: int) -> Schedule:
    """The same input gives the same order. Stops at `goal`, after `tries`, or when no exchange is left."""
    generator = random.Random(0)
    here = best = simulate(schedule, costs)
    refused: set[tuple[int, int]] = set()  # exchanges that made this order slower
    for _ in range(min(tries, _EFFORT // sum(map(len, schedule.workers)))):
        moves = [move for move in _critical_pairs(here) if move not in refused]
        if best.makespan <= goal + _TOLERANCE or not moves:
            break
        move = generator.choice(moves)
        there = _exchanged(here, *move, cap)
        if there is None or there.makespan > here.makespan + _TOLERANCE:
            refused.add(move)
            continue
        if there.makespan < here.makespan - _TOLERANCE:
            best = there
        here, refused = there, set()
    return best.schedule


def _exchanged(timeline: Timeline, worker: int, position: int, cap: float) -> Timeline | None:
    """The timeline with the action at the position and the one before it exchanged; None if that breaks the cap."""
    schedule, costs = timeline.schedule, timeline.costs
    row = list(schedule.workers[worker])
    row[position - 1], row[position] = row[position], row[position - 1]
    changed: Row = tuple(row)
    if in_flight(changed, costs.activation) > cap + _TOLERANCE:
        return None
    rows = (*schedule.workers[:worker], changed, *schedule.workers[worker + 1 :])
    return simulate(replace(schedule, workers=rows), costs)


def _critical_pairs(timeline: Timeline) -> list[tuple[int, int]]:
    """(worker, position) of actions on one critical path that start when the previous action of their worker ends."""
    schedule = timeline.schedule
    where: dict[Action, tuple[int, int]] = {}
    maker: dict[object, Action] = {}
    for worker, row in enumerate(schedule.workers):
        for position, action in enumerate(row):
            where[action] = (worker, position)
            maker[makes(action)] = action
    pairs = []
    last = max((row[-1] for row in timeline.spans if row), key=lambda span: span.end)
    while last.start > _TOLERANCE:
        worker, position = where[last.action]
        before = timeline.spans[worker][position - 1] if position else None
        wanted = [maker[token] for token in needs(last.action, schedule.stages)]
        if before is not None and before.end >= last.start - _TOLERANCE:
            computes = before.action.kind in COMPUTE and last.action.kind in COMPUTE
            if computes and before.action not in wanted:
                pairs.append((worker, position))
            last = before
        else:
            last = max((timeline.span(action) for action in wanted), key=lambda span: span.end)
    return pairs
