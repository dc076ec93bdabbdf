"""The best decompositions so far, and their number."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from cubeloom.parallel.config import ParallelConfig
from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.cost_model.schedules import ScheduleModel
from cubeloom.plan.search.space import Array


@dataclass(frozen=True)
class Candidate:
    """A decomposition by its indices in the arrays of the search."""

    seconds: float  # a lower bound over all placements
    shape: ScheduleModel
    workers: int
    data: int
    microbatches: int
    recompute: Recompute
    cube: tuple[int, int, int]  # z, y, x
    microbatch: int
    sharded: bool
    weights: int
    regathered: bool
    ways: int


@dataclass
class Tally:
    """The number of decompositions, and how many were refused for each reason."""

    considered: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class Best:
    """The best so far, and the bound that others must beat."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.bar = float("inf")
        self.found: list[Candidate] = []

    def offer(
        self, seconds: Array, s: ParallelConfig, count: Array, shape: ScheduleModel, workers: int, recompute: Recompute
    ) -> None:
        under = np.nonzero(seconds < self.bar)[0]
        if len(under) > self.keep:
            under = under[np.argpartition(seconds[under], self.keep)[: self.keep]]
        samples = np.asarray(s.samples_of)
        self.found += [
            _candidate(s, samples, int(place), float(seconds[place]), shape, workers, count, recompute)
            for place in under
        ]
        self.found = sorted(self.found, key=lambda each: each.seconds)[: self.keep]
        if len(self.found) == self.keep:
            self.bar = self.found[-1].seconds


def _candidate(
    s: ParallelConfig,
    samples: Array,
    at: int,
    seconds: float,
    shape: ScheduleModel,
    workers: int,
    count: Array,
    recompute: Recompute,
) -> Candidate:
    return Candidate(
        seconds=seconds,
        shape=shape,
        workers=workers,
        data=int(s.data[at]),
        microbatches=int(count[at]),
        recompute=recompute,
        cube=(int(s.z[at]), int(s.y[at]), int(s.x[at])),
        microbatch=round(float(samples[at])),
        sharded=bool(s.sharded[at]),
        weights=int(s.weights[at]),
        regathered=bool(s.regathered[at]),
        ways=int(s.ways[at]),
    )
