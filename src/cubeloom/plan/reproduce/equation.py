"""Chimera's own performance model, its equation 1, and the choice of W, D and B by it.

    T = (F_t + p2p) · C_f + (B_t + p2p) · C_b + max over stages of the exposed all-reduce

C_f and C_b are the forwards and backwards on the critical path. The paper counts them in its figure 6; here they are
the growth of the simulated schedule's time when every forward, or every backward, gets longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from cubeloom.pipeline import Costs, Schedule, Sync, generate, simulate, synchronised
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.reproduce.pipelines import Setup, fits, stages

_BACKWARD = 2.0  # B_t in forwards, as in the paper; one more with recomputation
_LITTLE = 1e-6


@dataclass(frozen=True)
class Estimate:
    setup: Setup
    seconds: float

    @property
    def throughput(self) -> float:
        return self.setup.batch / self.seconds


def critical_path(schedule: Schedule, backward: float = _BACKWARD) -> tuple[float, float]:
    """C_f and C_b, if a backward takes this many forwards."""

    def time(f: float, b: float) -> float:
        return simulate(schedule, Costs.uniform(schedule.stages, f, b / 2, b / 2)).makespan

    plain = time(1.0, backward)
    return (time(1 + _LITTLE, backward) - plain) / _LITTLE, (time(1.0, backward + _LITTLE) - plain) / _LITTLE


def estimate(setup: Setup, cluster: Cluster) -> Estimate:
    """Equation 1. As in the paper, all stages count as equal: F_t is their mean."""
    schedule = generate(setup.schedule, setup.depth, setup.microbatches, mode=setup.mode)
    real = stages(setup, cluster, schedule.replicas, recompute=False)
    forward = sum(real.forward) / setup.depth
    alike = replace(
        Costs.uniform(setup.depth, forward, forward * _BACKWARD / 2, forward * _BACKWARD / 2), reduce=real.reduce
    )
    timeline = simulate(synchronised(schedule, Sync.EAGER_OPT, alike), alike)
    left_over = timeline.makespan - max(row[-1].end for row in timeline.spans)
    forwards, backwards = critical_path(schedule)
    passes = (forward + real.message) * forwards + (forward * _BACKWARD + real.message) * backwards
    return Estimate(setup, passes + left_over)


def choices(setup: Setup, depths: Iterable[int], cluster: Cluster, growth: float) -> Iterator[Estimate]:
    """For each number of stages, on the same nodes: the largest micro-batch that fits memory, by equation 1."""
    for depth in depths:
        width = setup.nodes // depth
        sizes = [2**power for power in range(20) if setup.batch % (width * 2**power) == 0]
        candidates = (replace(setup, depth=depth, width=width, size=size) for size in reversed(sizes))
        fitting = next((each for each in candidates if fits(each, cluster, growth)), None)
        if fitting is not None:
            yield estimate(fitting, cluster)
