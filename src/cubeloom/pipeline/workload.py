"""One worker's part of a schedule in numbers, from which its bytes and memory follow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cubeloom.pipeline import Kind, Schedule
from cubeloom.pipeline.dependencies import needs
from cubeloom.pipeline.memory import versions


@dataclass(frozen=True)
class HeldStage:
    """A stage of a replica on the worker: how often it runs, and how often a kept weight is gathered for it."""

    stage: int
    passes: int
    gathers: int


@dataclass(frozen=True)
class Workload:
    portions: int  # micro-batches of a step, or their halves
    held: tuple[HeldStage, ...]
    receives: tuple[tuple[int, int], ...]  # (the stage whose output or gradient arrives, how often)

    @classmethod
    def of(cls, schedule: Schedule, worker: int) -> Workload:
        row = schedule.workers[worker]
        held = tuple(_held(schedule, worker, replica, stage) for replica, stage in schedule.held_by(worker))
        arriving: Counter[int] = Counter()
        for action in row:
            for what, stage, *_ in needs(action, schedule.stages):
                if stage != action.stage and schedule.homes[action.replica, stage] != worker:
                    # The gradient of a stage's input is as large as the previous stage's output.
                    arriving[stage if what == "F" else stage - 1] += 1
        portions = schedule.microbatches * (2 if schedule.halved else 1)
        return cls(portions, held, tuple(sorted(arriving.items())))


def _held(schedule: Schedule, worker: int, replica: int, stage: int) -> HeldStage:
    """A kept weight is gathered when none of its portions is in flight, and when the gathered copy has another version.

    The other version can be an older one, or one from before an update.
    """
    used = versions(schedule, worker)
    passes = gathers = flying = 0
    gathered: int | None = None  # the version
    for action in schedule.workers[worker]:
        if (action.replica, action.stage) != (replica, stage):
            continue
        if action.kind is Kind.UPDATE:
            gathered = None
        elif action.kind is Kind.FORWARD or action.makes_input_grad:
            version = used[replica, stage, action.microbatch]
            gathers += gathered != version
            passes += action.kind is Kind.FORWARD
            flying += 1 if action.kind is Kind.FORWARD else -1
            gathered = version if flying else None
    return HeldStage(stage, passes, gathers)


def holders(schedule: Schedule, *stages: int) -> list[int]:
    """The workers that hold one of these stages."""
    return sorted({line[stage] for line in schedule.placement for stage in stages})
