"""A plan: one decomposition with what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cubeloom.base.grid import Grid
from cubeloom.parallel.config import WEIGHTS, ParallelConfig
from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.cost_model.schedules import ScheduleModel
from cubeloom.plan.search.space import Task


@dataclass(frozen=True, kw_only=True)
class Plan:
    grid: Grid
    shape: ScheduleModel
    microbatches: int
    microbatch: int  # samples of one rank of data and z
    sharded: bool
    weights: int
    regathered: bool
    ways: int
    recompute: Recompute
    seconds: float
    error: float  # as a share of the seconds
    computed: float
    bubble: float  # seconds
    exposed: float  # seconds of communication that nothing hides
    memory: dict[str, float]  # bytes by class
    closed: float  # seconds of the closed form; `seconds` are the simulated ones where it was simulated
    simulated: bool = False

    @property
    def total_memory(self) -> float:
        return sum(self.memory.values())

    @property
    def rest(self) -> str:
        activations = "sharded" if self.sharded else "replicated"
        return f"{activations}/{WEIGHTS[self.weights]}/{'regathered' if self.regathered else 'kept'}"

    @property
    def recordable(self) -> bool:
        """Whether its stages can be recorded as CUDA graphs: no collective, no strand and no forward once more is in them."""
        g = self.grid
        return g.x * g.y * g.z == 1 and self.ways == 1 and not self.recompute

    @property
    def rank_stride(self) -> dict[str, float]:
        """For each axis how many ranks lie between neighbours on it."""
        within, found = 1, {}
        for axis in reversed(self.grid.placement):
            found[axis] = float(within)
            within *= self.grid.size(axis)
        return found

    def settings(self, task: Task, number: Any = float) -> ParallelConfig:
        """Of one portion: a micro-batch, or half of one where the schedule halves them."""
        g = self.grid
        return ParallelConfig(
            data=number(g.data),
            z=number(g.z),
            y=number(g.y),
            x=number(g.x),
            samples=number(self.microbatch * g.data * g.z) / (2 if self.shape.halves else 1),
            sequence=task.sequence,
            sharded=self.sharded,
            weights=self.weights,
            regathered=self.regathered,
            ways=self.ways,
            item=task.item,
            gradients=task.gradients,
            precision=task.precision,
            rank_stride=self.rank_stride,
        )

    def timed(self, seconds: float, bubble: float) -> Plan:
        """With the simulator's times: what is neither computed nor bubble is exposed communication."""
        exposed = max(0.0, seconds - self.computed - bubble)
        # On one device it is nothing but the rounding of the three.
        exposed = 0.0 if exposed < 1e-9 * seconds else exposed
        return replace(self, seconds=seconds, bubble=bubble, exposed=exposed, simulated=True)
