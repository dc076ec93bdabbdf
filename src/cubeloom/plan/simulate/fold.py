"""Steps of many micro-batches from those of few: past its first rounds a schedule repeats itself."""

from __future__ import annotations

from functools import cache

import numpy as np

from cubeloom.pipeline import Schedule, generate
from cubeloom.plan.cost_model.schedules import ScheduleModel
from cubeloom.plan.simulate.run import Outcome, StageTimes, simulate

_TRIES = 8  # of schedules that are searched for: their first orders are the best but where micro-batches are few
_SEARCHED = 4


def _is_searched(shape: ScheduleModel) -> bool:
    return shape.name == "chimera-zb"


@cache
def schedule_of(shape: ScheduleModel, workers: int, microbatches: int) -> Schedule:
    tries = _TRIES if _is_searched(shape) else None
    chunks = shape.chunks if shape.name == "interleaved" else None
    return generate(shape.name, workers, microbatches, pairs=shape.pairs, mode=shape.mode, tries=tries, chunks=chunks)


def _counts(shape: ScheduleModel, workers: int, microbatches: int) -> tuple[int, ...]:
    """Of how many micro-batches steps are simulated: two rounds of D at least and what is left over, and one round more."""
    period = shape.round * workers
    few = max(2 * workers, period) + microbatches % period
    return (microbatches,) if microbatches <= few + period else (few, few + period)


def actions(shape: ScheduleModel, workers: int, microbatches: int) -> int:
    """How many actions that takes. One that is searched for takes as long as several that follow a rule."""
    each = (
        (3 if shape.split else 2)
        * (2 if shape.halves else 1)
        * shape.chunks
        * (_SEARCHED if _is_searched(shape) else 1)
    )
    return workers * sum(_counts(shape, workers, microbatches)) * each


def folded(shape: ScheduleModel, workers: int, microbatches: int, times: StageTimes) -> Outcome:
    """The step, from two shorter ones where it is long."""
    counts = _counts(shape, workers, microbatches)
    if len(counts) == 1:
        return simulate(schedule_of(shape, workers, microbatches), times)
    first, second = (simulate(schedule_of(shape, workers, count), times) for count in counts)
    rounds = (microbatches - counts[0]) / (counts[1] - counts[0])
    busy = second.busy - first.busy
    # Where stages differ much, workers wait less in each of the first rounds. No later one is shorter than its busiest worker.
    least = busy.max(axis=0)

    def grown(before: np.ndarray, after: np.ndarray) -> np.ndarray:
        return np.asarray(before + rounds * np.maximum(after - before, least))

    return Outcome(
        grown(first.seconds, second.seconds), grown(first.pipeline, second.pipeline), first.busy + rounds * busy
    )
