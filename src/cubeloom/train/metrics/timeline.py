"""The measured timeline of a step, and the simulated one of the same rows with the measured times."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.pipeline import Action, Costs, Kind, Schedule, Timeline, simulate
from cubeloom.pipeline.action import COMPUTE
from cubeloom.pipeline.simulator import Span

NAME = "timeline.json"
_MS = 1e3  # pictures are in milliseconds, the file in seconds


@dataclass(frozen=True)
class MeasuredStep:
    step: int
    measured: Timeline
    simulated: Timeline  # the same actions, each as long as the median of its kind and stage; messages take no time


def read_timeline(file: Path) -> MeasuredStep:
    """Raises UserError for a file that does not have the time of every action of its schedule."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        step, unit = int(content["step"]), content["unit"]
        schedule, workers = Schedule.parse(content["schedule"]), content["workers"]
        if unit != "s":
            raise UserError(f"times in {unit!r}; they are in 's'")
        if len(workers) != len(schedule.workers):
            raise UserError(f"times of {len(workers)} workers, and its schedule has {len(schedule.workers)}")
        spans = tuple(_row(schedule, worker, given) for worker, given in enumerate(workers))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{file} is not the timeline of a step: {type(error).__name__} {error}") from None
    costs = measured_costs(schedule, spans)
    measured = Timeline(_named(schedule, "measured"), costs, spans, ())
    return MeasuredStep(step, measured, simulate(_named(schedule, "simulated"), costs))


def _named(schedule: Schedule, how: str) -> Schedule:
    """The schedule with this name, which is the title of its picture."""
    return replace(schedule, name=f"{schedule.name}, {how}")


def _row(schedule: Schedule, worker: int, given: Iterable[Mapping[str, Any]]) -> tuple[Span, ...]:
    """One worker's actions in the order of its row. A launch that was not timed takes no time."""
    times = {Action.parse(each["action"]): (float(each["start"]), float(each["end"])) for each in given}
    row, spans = schedule.workers[worker], list[Span]()
    foreign = sorted(map(str, times.keys() - set(row)))
    if foreign:
        raise UserError(f"worker {worker} has {foreign[0]}, which its row of the schedule has not")
    for action in row:
        if action not in times and action.kind in COMPUTE:
            raise UserError(f"worker {worker} has no time of {action}")
        before = spans[-1].end / _MS if spans else 0.0
        start, end = times.get(action, (before, before))
        if not (math.isfinite(start) and start <= end < math.inf):
            raise UserError(f"worker {worker}: {action} goes from {start} to {end}")
        spans.append(Span(action, start * _MS, end * _MS))
    return tuple(spans)


def measured_costs(schedule: Schedule, spans: Sequence[Sequence[Span]]) -> Costs:
    """Medians of each stage's forward, input gradient and weight gradient; a whole backward counts half for each."""
    took: dict[tuple[Kind, int], list[float]] = {}
    for span in (span for row in spans for span in row):
        took.setdefault((span.action.kind, span.action.stage), []).append((span.end - span.start) / span.action.size)

    def of(kind: Kind, stage: int) -> float:
        if (kind, stage) in took:
            return median(took[kind, stage])
        if kind is Kind.FORWARD or (Kind.BACKWARD, stage) not in took:
            return 0.0
        return median(took[Kind.BACKWARD, stage]) / 2

    def each(kind: Kind) -> tuple[float, ...]:
        return tuple(of(kind, stage) for stage in range(schedule.stages))

    share = (schedule.chunk,) * schedule.stages
    return Costs(each(Kind.FORWARD), each(Kind.INPUT_GRAD), each(Kind.WEIGHT_GRAD), activation=share, weights=share)
