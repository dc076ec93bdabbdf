"""A step rank by rank: each rank of a grid computes at its own speed, and waits for the ranks it communicates with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cubeloom.base.grid import Grid
from cubeloom.pipeline import Schedule
from cubeloom.plan.simulate.run import Outcome, Ranks, StageTimes, simulate


def simulate_ranks(schedule: Schedule, times: StageTimes, grid: Grid, slowness: NDArray[Any] | None = None) -> Outcome:
    """`times` are of one plan, [stages]; results are [data, z·y·x], for each rank the latest of its pipeline.

    `slowness` of each rank, [pipe, data, z·y·x] as far as it differs, multiplies its computation; 1 by default. Ranks
    of one cube meet in the collectives of every layer, so they end every action together; those along data meet in the
    gradient reduction.
    """
    shape = (grid.pipe, grid.data, grid.cube)
    slow = np.broadcast_to(1.0 if slowness is None else slowness, shape)

    def along(axis: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
        return lambda ends: np.broadcast_to(ends.max(axis=axis, keepdims=True), ends.shape)

    return simulate(schedule, times, Ranks(slow, along(-1), along(0)))
