"""What an action needs before it can start and what it produces, as tokens; and a run of the rows that respects them.

A token is (what, stage, micro-batch, part): the output of a forward, or the input gradient of a backward. Checker,
simulator and list scheduler share this definition of a pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cubeloom.pipeline.action import Action, Kind
from cubeloom.pipeline.schedule import Schedule

Token = tuple[str, int, int, int | None]


def needs(action: Action, stages: int) -> list[Token]:
    """Tokens that must exist before the action starts. A token of a stage on another worker is sent as a message."""
    stage, kind, microbatch, _, part = action
    if kind is Kind.FORWARD:
        return [("F", stage - 1, microbatch, part)] if stage else []
    if kind is Kind.BACKWARD or kind is Kind.INPUT_GRAD:
        own: Token = ("F", stage, microbatch, part)
        return [own, ("I", stage + 1, microbatch, part)] if stage + 1 < stages else [own]
    if kind is Kind.WEIGHT_GRAD:
        return [("I", stage, microbatch, part)]
    return []


def makes(action: Action) -> Token | None:
    """The token that the action produces, if any."""
    if action.kind is Kind.FORWARD:
        return ("F", action.stage, action.microbatch, action.part)
    if action.makes_input_grad:
        return ("I", action.stage, action.microbatch, action.part)
    return None


def maker(token: Token) -> str:
    """The name of the producer: `3F0`, or `3B0` for an input gradient, which may also be an I."""
    what, stage, microbatch, part = token
    kind = "F" if what == "F" else "B"
    return f"{stage}{kind}{microbatch}" + ("" if part is None else f".{part}")


def run(schedule: Schedule, visit: Callable[[int, Action, list[Token]], None]) -> list[int]:
    """Visit every action after all it needs, each worker in its order; return how far each worker got.

    The order within rows is fixed, so no clock is needed: a worker stops at a missing token and continues when the
    token is produced. Linear in the number of actions. If the schedule deadlocks, some workers do not reach their end.
    """
    position = [0] * len(schedule.workers)
    made: set[Token] = set()
    asleep: dict[Token, list[int]] = {}
    awake = deque(range(len(schedule.workers)))
    while awake:
        worker = awake.popleft()
        row = schedule.workers[worker]
        while position[worker] < len(row):
            action = row[position[worker]]
            wanted = needs(action, schedule.stages)
            missing = next((token for token in wanted if token not in made), None)
            if missing is not None:
                asleep.setdefault(missing, []).append(worker)
                break
            visit(worker, action, wanted)
            position[worker] += 1
            token = makes(action)
            if token is not None and token not in made:
                made.add(token)
                awake.extend(asleep.pop(token, ()))
    return position
