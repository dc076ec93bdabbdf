"""Where a worker's program sends and receives messages, so that even blocking transfers cannot deadlock.

Take one order of all actions that respects every dependency. When an action ends, its send is appended to its worker's
program, and the matching receive to the other worker's. All programs then agree with that one order. Rendezvous
transfers (a send waits for its receive, a receive for its send) therefore always find their partner, and on every
directed edge receives are in the order of sends, so a channel needs no tags.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from cubeloom.pipeline.action import Action
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.dependencies import Token, makes, needs
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.simulator import simulate


@dataclass(frozen=True)
class Message:
    """A message from one worker to another: the output of a forward ("F") or an input gradient ("I")."""

    token: Token
    source: int
    target: int

    def __str__(self) -> str:
        what, stage, microbatch, part = self.token
        half = "" if part is None else f".{part}"
        return f"{'output' if what == 'F' else 'gradient'} {stage}{what}{microbatch}{half}"


@dataclass(frozen=True)
class Send:
    message: Message

    def __str__(self) -> str:
        return f"send of {self.message}"


@dataclass(frozen=True)
class Receive:
    message: Message

    def __str__(self) -> str:
        return f"receive of {self.message}"


Step = Action | Send | Receive
Programme = tuple[tuple[Step, ...], ...]


def programme(schedule: Schedule, costs: Costs | None = None) -> Programme:
    """Each worker's actions, sends and receives. Costs only move receives: earlier if a sender is ahead."""
    timeline = simulate(schedule, costs)
    wanted_by = _wanted_by(schedule)
    steps: list[list[Step]] = [[] for _ in schedule.workers]
    # In the order of their ends every action comes after those it needs; equal ends keep the order of dependencies.
    for worker, action in _in_order(schedule, {s.action: s.end for row in timeline.spans for s in row}):
        steps[worker].append(action)
        token = makes(action)
        target = wanted_by.get(token) if token else None
        if token and target is not None and target != worker:
            message = Message(token, worker, target)
            steps[worker].append(Send(message))
            steps[target].append(Receive(message))
    return tuple(map(tuple, steps))


def edges(programme: Programme) -> dict[tuple[int, int], list[Message]]:
    """The messages of each directed edge, in the order of the sends and, in a correct program, of the receives."""
    found: dict[tuple[int, int], list[Message]] = {}
    for steps in programme:
        for step in steps:
            if isinstance(step, Send):
                found.setdefault((step.message.source, step.message.target), []).append(step.message)
    return found


def arrived(programme: Programme, here: int) -> dict[Token, list[Token]]:
    """For each message to worker `here`, its own messages that the sender had used before: their buffers can be freed."""
    stages = 1 + max(step.stage for steps in programme for step in steps if isinstance(step, Action))
    messages = edges(programme)
    found: dict[Token, list[Token]] = {}
    for worker, steps in enumerate(programme):
        sent = {message.token for message in messages.get((here, worker), ())}
        used: list[Token] = []
        for step in steps:
            if isinstance(step, Action):
                used += [token for token in needs(step, stages) if token in sent]
            elif isinstance(step, Send) and step.message.target == here:
                found[step.message.token], used = used, []
    return found


def stuck(programme: Programme) -> dict[int, Step]:
    """Run the program with rendezvous transfers and return the steps where workers are stuck. Empty if all reach their
    end.
    """
    position = [0] * len(programme)
    awake = list(range(len(programme)))
    while awake:
        worker = awake.pop()
        while (step := _at(programme, position, worker)) is not None:
            if isinstance(step, Action):
                position[worker] += 1
                continue
            message = step.message
            other = message.target if isinstance(step, Send) else message.source
            partner = _at(programme, position, other)
            matching = Receive(message) if isinstance(step, Send) else Send(message)
            if partner != matching:
                break
            position[worker] += 1
            position[other] += 1
            awake.append(other)
    return {w: step for w in range(len(programme)) if (step := _at(programme, position, w)) is not None}


def _at(programme: Programme, position: list[int], worker: int) -> Step | None:
    return programme[worker][position[worker]] if position[worker] < len(programme[worker]) else None


def _wanted_by(schedule: Schedule) -> dict[Token, int]:
    return {
        token: worker
        for worker, action in schedule.actions
        for token in needs(action, schedule.stages)
        if token[1] != action.stage
    }


def _in_order(schedule: Schedule, ends: dict[Action, float]) -> Iterator[tuple[int, Action]]:
    """All actions, ordered by end as far as rows and dependencies allow."""
    position = [0] * len(schedule.workers)
    made: set[Token] = set()
    asleep: dict[Token, list[int]] = {}
    heap: list[tuple[float, int]] = []

    def offer(worker: int) -> None:
        if position[worker] == len(schedule.workers[worker]):
            return
        action = schedule.workers[worker][position[worker]]
        missing = next((token for token in needs(action, schedule.stages) if token not in made), None)
        if missing is None:
            heapq.heappush(heap, (ends[action], worker))
        else:
            asleep.setdefault(missing, []).append(worker)

    for worker in range(len(schedule.workers)):
        offer(worker)
    while heap:
        _, worker = heapq.heappop(heap)
        action = schedule.workers[worker][position[worker]]
        position[worker] += 1
        yield worker, action
        token = makes(action)
        if token is not None:
            made.add(token)
            for sleeper in asleep.pop(token, ()):
                offer(sleeper)
        offer(worker)
