"""Where each stage's replicas start to reduce their gradients: R actions inserted into a synchronous schedule.

Chimera's three ways (Li & Hoefler 2021, section 3.2): at the end of the step; eager, as soon as a stage's last gradient
exists; eager-opt, eagerly only where a bubble follows that can hide the reduction, because elsewhere its progress slows
the computation.
"""

from __future__ import annotations

from enum import StrEnum

from cubeloom.base.errors import UserError
from cubeloom.pipeline.action import COMPUTE, Action, Kind
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.schedule import Row, Schedule, Updates
from cubeloom.pipeline.simulator import Span, Timeline, simulate

Home = tuple[int, int]  # replica, stage


class Sync(StrEnum):
    END = "end"
    EAGER = "eager"
    EAGER_OPT = "eager-opt"


def overlapped(schedule: Schedule) -> Schedule:
    """Its gradients reduced as early as the schedule allows, where it reduces any and does not say itself when."""
    says = any(action.kind is Kind.REDUCE for row in schedule.workers for action in row)
    return schedule if says or schedule.updates is not Updates.FLUSH else synchronised(schedule, Sync.EAGER)


def synchronised(schedule: Schedule, sync: Sync, costs: Costs | None = None) -> Schedule:
    """The schedule with one R per stage of every replica. Costs are used by eager-opt only, to find bubbles.

    All workers launch reductions in one order, that of the stages' last gradients, so no two workers wait for each
    other. A stage that would overtake another on its worker waits for that one's launch.
    """
    if schedule.updates is not Updates.FLUSH:
        raise UserError(f"{schedule.name} updates its weights as it goes: it has no gradients to reduce at the end")
    timeline = simulate(_without(schedule), costs)
    ready = {stage: max(times) for stage, times in _last_gradients(timeline).items()}
    order = sorted(ready, key=lambda stage: (ready[stage], stage))
    rows = [_row(timeline.spans[worker], order, sync) for worker in range(len(schedule.workers))]
    return Schedule(schedule.name, schedule.stages, schedule.microbatches, tuple(rows))


def _without(schedule: Schedule) -> Schedule:
    rows = tuple(tuple(a for a in row if a.kind is not Kind.REDUCE) for row in schedule.workers)
    return Schedule(schedule.name, schedule.stages, schedule.microbatches, rows)


def _last_gradients(timeline: Timeline) -> dict[int, list[float]]:
    found: dict[Home, float] = {}
    for row in timeline.spans:
        for span in row:
            if span.action.makes_weight_grad:
                found[span.action.replica, span.action.stage] = span.end
    stages: dict[int, list[float]] = {}
    for (_, stage), end in found.items():
        stages.setdefault(stage, []).append(end)
    return stages


def _row(spans: tuple[Span, ...], order: list[int], sync: Sync) -> Row:
    last: dict[Home, int] = {}  # the position of the last gradient of each stage of the worker
    for position, span in enumerate(spans):
        if span.action.makes_weight_grad:
            last[span.action.replica, span.action.stage] = position
    row: list[Action] = []
    waiting = sorted(last, key=lambda home: (order.index(home[1]), home))
    for position, span in enumerate(spans):
        row.append(span.action)
        # A stage is launched only after those before it in the common order.
        while waiting and last[waiting[0]] <= position and _wanted(spans, position, sync):
            replica, stage = waiting.pop(0)
            row.append(Action(stage, Kind.REDUCE, spans[last[replica, stage]].action.microbatch, replica))
    return tuple(row)


def _wanted(spans: tuple[Span, ...], position: int, sync: Sync) -> bool:
    """Whether a reduction may start after this action."""
    if position + 1 == len(spans):
        return True
    if sync is Sync.END:
        return False
    rest = [span for span in spans[position + 1 :] if span.action.kind in COMPUTE]
    idle = rest[-1].end - spans[position].end - sum(span.end - span.start for span in rest)
    return sync is Sync.EAGER or idle > 1e-9
