"""GPipe (Huang et al. 2019): all forwards, then all backwards."""

from __future__ import annotations

from cubeloom.pipeline.action import backward, forward
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.schedules._common import at_least_one


def gpipe(stages: int, microbatches: int) -> Schedule:
    at_least_one("gpipe", stages, microbatches)
    order = range(microbatches)
    rows = [[forward(s, m) for m in order] + [backward(s, m) for m in order] for s in range(stages)]
    return Schedule("gpipe", stages, microbatches, tuple(map(tuple, rows)))
