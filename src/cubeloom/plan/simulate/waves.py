"""The actions of a schedule in waves: actions of one wave are independent, so one array operation computes them all."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cubeloom.base.errors import UserError
from cubeloom.pipeline import Kind, Schedule
from cubeloom.pipeline.action import COMPUTE
from cubeloom.pipeline.dependencies import Token, makes, needs

Array = NDArray[Any]
KINDS = {kind: number for number, kind in enumerate((Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))}


@dataclass(frozen=True)
class Wave:
    """At most one action per worker."""

    actions: Array  # their numbers
    workers: Array
    work: Array  # kind · stages + stage
    sizes: Array  # of the micro-batch that each works on
    waits: Array  # the number of another worker's action to wait for; the number after the last one: none


@dataclass(frozen=True)
class Waves:
    count: int  # actions
    waves: tuple[Wave, ...]
    last: dict[tuple[int, int], int]  # (stage, worker): the action of its last gradient


@lru_cache(maxsize=512)
def waves(schedule: Schedule) -> Waves:
    rows = [[action for action in row if action.kind in COMPUTE] for row in schedule.workers]
    first = np.cumsum([0, *map(len, rows)])
    makers: dict[Token, tuple[int, int]] = {}
    for worker, row in enumerate(rows):
        for place, action in enumerate(row):
            token = makes(action)
            if token is not None:
                makers[token] = worker, int(first[worker]) + place
    waits = [[_other(action, worker, schedule.stages, makers) for action in row] for worker, row in enumerate(rows)]
    depths = _depths(rows, waits, first, schedule.name)
    return _gathered(schedule, rows, waits, depths, first)


def _other(action: Any, worker: int, stages: int, makers: dict[Token, tuple[int, int]]) -> int:
    """The action of another worker that it needs. What it needs of its own worker comes before it in the row."""
    for token in needs(action, stages):
        home, number = makers[token]
        if home != worker:
            return number
    return -1


def _depths(rows: list[Any], waits: list[list[int]], first: Array, name: str) -> list[int]:
    """The wave of each action: one after the last of those that it needs."""
    depths = [-1] * int(first[-1])
    place = [0] * len(rows)
    asleep: dict[int, int] = {}
    awake = deque(range(len(rows)))
    while awake:
        worker = awake.popleft()
        start = int(first[worker])
        before = depths[start + place[worker] - 1] if place[worker] else -1
        while place[worker] < len(rows[worker]):
            needed = waits[worker][place[worker]]
            if needed >= 0 and depths[needed] < 0:
                asleep[needed] = worker
                break
            before = max(before, depths[needed] if needed >= 0 else -1) + 1
            number = start + place[worker]
            depths[number] = before
            place[worker] += 1
            if number in asleep:
                awake.append(asleep.pop(number))
    if min(depths, default=0) < 0:
        raise UserError(f"schedule {name} never ends: the checker says why")
    return depths


def _gathered(schedule: Schedule, rows: list[Any], waits: list[list[int]], depths: list[int], first: Array) -> Waves:
    count = int(first[-1])
    workers = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    flat = [action for row in rows for action in row]
    work = np.array([KINDS[action.kind] * schedule.stages + action.stage for action in flat])
    sizes = np.array([1.0 if action.part is None else action.size for action in flat])
    needed = np.array([number for row in waits for number in row])
    needed[needed < 0] = count
    order = np.argsort(depths, kind="stable")
    cuts = np.nonzero(np.diff(np.array(depths)[order]))[0] + 1
    found = [Wave(part, workers[part], work[part], sizes[part], needed[part]) for part in np.split(order, cuts)]
    homes = zip(flat, workers.tolist(), strict=True)
    last = {(action.stage, home): number for number, (action, home) in enumerate(homes) if action.makes_weight_grad}
    return Waves(count, tuple(found), last)
