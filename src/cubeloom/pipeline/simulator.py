"""The timeline of a schedule under given costs: spans, makespan, bubbles, memory over time.

Messages take `costs.message` and overlap with computation, as in a runtime with one channel per directed edge. A
reduction starts when every replica of its stage has launched it, and then occupies the network of its workers. It
overlaps with the computation and slows it by the fraction `costs.drag`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cubeloom.base.errors import UserError
from cubeloom.pipeline import memory
from cubeloom.pipeline.action import COMPUTE, Action, Kind
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.dependencies import Token, makes, run
from cubeloom.pipeline.schedule import Schedule, Updates


class Span(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Reduction:
    """The gradient reduction of one stage over its replicas, on all workers that hold one."""

    stage: int
    workers: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]  # per worker, its actions in order with their times
    reductions: tuple[Reduction, ...]

    @cached_property
    def makespan(self) -> float:
        ends = [row[-1].end for row in self.spans if row] + [reduction.end for reduction in self.reductions]
        return max(ends, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each worker computes."""
        return tuple(sum(s.end - s.start for s in row if s.action.kind in COMPUTE) for row in self.spans)

    @cached_property
    def ideal(self) -> float:
        """The work of the busiest worker: no order of these rows can be faster."""
        return max(self.busy, default=0.0)

    @cached_property
    def bubble_ratio(self) -> tuple[float, ...]:
        """The fraction of the makespan in which each worker does not compute."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @cached_property
    def activations(self) -> tuple[memory.Curve, ...]:
        """Per worker, the activations it holds over time, in units of `costs.activation`."""
        return tuple(memory.activations([(s.action, s.start, s.end) for s in row], self.costs) for row in self.spans)

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        return tuple(memory.peak(curve) for curve in self.activations)

    @cached_property
    def weights(self) -> tuple[memory.Curve, ...]:
        """Per worker, the weights it holds over time: all replicas, and all versions still in use."""
        return tuple(
            memory.weights(self.schedule, worker, [(s.action, s.start, s.end) for s in row], self.costs)
            for worker, row in enumerate(self.spans)
        )

    @cached_property
    def weight_copies(self) -> float:
        """The most copies that any worker holds, in units of one worker's share: 1 without replicas or old versions."""
        share = sum(self.costs.weights) / len(self.schedule.workers)
        return max(memory.peak(curve) for curve in self.weights) / share if share else 0.0

    def span(self, action: Action) -> Span:
        return self._spans[action]

    @cached_property
    def _spans(self) -> dict[Action, Span]:
        return {span.action: span for row in self.spans for span in row}


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run the rows as early as dependencies allow. Without R actions, replicas are reduced at the end of the step."""
    costs = costs or Costs.like(schedule)
    if len(costs.forward) != schedule.stages:
        raise UserError(f"costs for {len(costs.forward)} stages cannot time a schedule of {schedule.stages}")
    ready: dict[Token, tuple[float, int]] = {}
    spans: list[list[Span]] = [[] for _ in schedule.workers]
    drags = _drags(schedule, costs)
    took: dict[tuple[Kind, int, int | None], float] = {}  # equal for every micro-batch

    def visit(worker: int, action: Action, wanted: list[Token]) -> None:
        row = spans[worker]
        start = row[-1].end if row else 0.0
        for token in wanted:
            time, home = ready[token]
            arrives = time if home == worker else time + costs.message * action.size
            if arrives > start:
                start = arrives
        work = (action.kind, action.stage, action.part)
        if action.kind not in COMPUTE:
            end = start + drags.get((worker, action), 0.0)
        else:
            if work not in took:
                took[work] = costs.time(action)
            end = start + took[work]
        row.append(Span(action, start, end))
        made = makes(action)
        if made is not None:
            ready[made] = (end, worker)

    reached = run(schedule, visit)
    if any(position < len(row) for position, row in zip(reached, schedule.workers, strict=True)):
        raise UserError(f"schedule {schedule.name} never ends: the checker says why")
    return Timeline(schedule, costs, tuple(map(tuple, spans)), tuple(_reductions(schedule, costs, spans)))


def _drags(schedule: Schedule, costs: Costs) -> dict[tuple[int, Action], float]:
    """The time by which launching a reduction delays its worker: zero if no computation follows it."""
    drags = {}
    for worker, row in enumerate(schedule.workers):
        work_follows = False
        for action in reversed(row):
            if action.kind is Kind.REDUCE:
                drags[worker, action] = costs.drag * costs.reduce[action.stage] if work_follows else 0.0
            work_follows |= action.kind in COMPUTE
    return drags


def _reductions(schedule: Schedule, costs: Costs, spans: list[list[Span]]) -> list[Reduction]:
    if schedule.updates is not Updates.FLUSH:
        return []
    launched: dict[int, list[tuple[float, int]]] = {}
    for (_, stage), worker in schedule.homes.items():
        launch = next(
            (s.start for s in spans[worker] if s.action.kind is Kind.REDUCE and s.action.stage == stage),
            spans[worker][-1].end,
        )
        launched.setdefault(stage, []).append((launch, worker))
    free = [0.0] * len(spans)
    found = []
    for stage, members in sorted(launched.items(), key=lambda item: (max(item[1])[0], item[0])):
        if costs.reduce[stage] == 0:
            continue
        workers = tuple(sorted({worker for _, worker in members}))
        start = max(max(members)[0], *(free[worker] for worker in workers))
        for worker in workers:
            free[worker] = start + costs.reduce[stage]
        found.append(Reduction(stage, workers, start, start + costs.reduce[stage]))
    return found
