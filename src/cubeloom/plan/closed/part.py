"""What one worker of a pipeline does of a schedule, in numbers: what its bytes and its memory follow from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cubeloom.pipeline import Kind, Schedule
from cubeloom.pipeline.dependencies import needs


@dataclass(frozen=True)
class Held:
    """A stage of a replica on the worker: how often it runs, and how often a weight that is kept is gathered for it."""

    stage: int
    passes: int
    gathers: int


@dataclass(frozen=True)
class Part:
    portions: int  # micro-batches of a step, or their halves
    held: tuple[Held, ...]
    receives: tuple[tuple[int, int], ...]  # (stage whose output, or its gradient, arrives; how often)

    @classmethod
    def of(cls, schedule: Schedule, worker: int) -> Part:
        row = schedule.workers[worker]
        held = []
        for replica, stage in schedule.held_by(worker):
            passes = gathers = flying = 0
            for action in row:
                if (action.replica, action.stage) != (replica, stage):
                    continue
                if action.kind is Kind.FORWARD:
                    passes += 1
                    gathers += flying == 0
                    flying += 1
                elif action.makes_input_grad:
                    flying -= 1
            held.append(Held(stage, passes, gathers))
        arriving: Counter[int] = Counter()
        for action in row:
            for what, stage, *_ in needs(action, schedule.stages):
                if stage != action.stage and schedule.homes[action.replica, stage] != worker:
                    # The gradient of a stage's input is as large as the output of the stage before.
                    arriving[stage if what == "F" else stage - 1] += 1
        portions = schedule.microbatches * (2 if schedule.halved else 1)
        return cls(portions, tuple(held), tuple(sorted(arriving.items())))


def holders(schedule: Schedule, *stages: int) -> int:
    """How many workers hold one of these stages."""
    return len({line[stage] for line in schedule.placement for stage in stages})
