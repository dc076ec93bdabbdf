"""A step on a grid of tensor and data axes, or of Megatron-LM's tensor, pipe and data; in bfloat16, by the planner's own
simulation of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubeloom.parallel.config import FREED, ParallelConfig
from cubeloom.plan.cost_model.memory import room
from cubeloom.plan.cost_model.schedules import ALONE, ONE_F_ONE_B
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.model import Model, with_stages
from cubeloom.plan.reproduce.report import Share
from cubeloom.plan.search.find import cost
from cubeloom.plan.simulate.plans import ScheduleGroup, simulated_step

ITEM = 2  # bytes per element
STATES = 18  # bytes per parameter with its gradient and optimizer states, as in Megatron-LM


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """Axes from the innermost out: x, y, z, data, pipe. `microbatch`: per rank of data, by default all of its share."""

    data: int = 1
    z: int = 1
    y: int = 1
    x: int = 1
    pipe: int = 1
    ways: int = 1
    microbatch: int | None = None

    def __str__(self) -> str:
        axes = [(name, getattr(self, name)) for name in ("pipe", "data", "z", "y", "x")]
        return ",".join(f"{name}={size}" for name, size in axes if size > 1)


@dataclass(frozen=True)
class Step:
    """Seconds of computation on the busiest rank, of waiting for others that compute, and of exposed communication."""

    grid: Decomposition
    seconds: float
    computed: float
    waited: float

    def share(self, name: str) -> Share:
        exposed = max(0.0, self.seconds - self.computed - self.waited)
        return Share(f"{name} ({self.grid})", {"computed": self.computed, "exposed": exposed, "waited": self.waited})


def step(model: Model, grid: Decomposition, samples: int, sequence: int, cluster: Cluster, again: bool) -> Step:
    """`samples` of the whole batch; `again`: activations are recomputed."""
    (found,) = steps(model, [grid], samples, sequence, cluster, again)
    return found


def steps(
    model: Model, grids: Sequence[Decomposition], samples: int, sequence: int, cluster: Cluster, again: bool
) -> list[Step]:
    """Of grids that differ in axes other than the pipe only, all at once."""
    first = grids[0]
    data, z, y, x = (np.array([float(getattr(grid, axis)) for grid in grids]) for axis in ("data", "z", "y", "x"))
    size = first.microbatch or samples / data  # samples of a rank of data
    count = 1 if first.microbatch is None else samples // first.data // first.microbatch
    pieces = cost(model, _on(data, z, y, x, size * data, sequence, first.ways), cluster, "bf16")
    alike = ScheduleGroup(ALONE if first.pipe == 1 else ONE_F_ONE_B, first.pipe, count, again)
    found = simulated_step(with_stages(model, first.pipe), cluster, pieces, alike)
    columns = [np.broadcast_to(each, len(grids)).tolist() for each in found]
    return [Step(grid, *numbers) for grid, *numbers in zip(grids, *columns, strict=True)]


def largest(model: Model, grid: Decomposition, share: int, cluster: Cluster) -> int:
    """The largest part of a rank's share, by halving, whose activations fit beside weights, gradients and states."""
    size = share
    while size > 1:
        rooms = [room(kind, _settings(grid, size, 1)) for kind in model.kinds]
        held = sum(float(rooms[kind].parameters * STATES + rooms[kind].activations) for kind in model.row)
        if held <= cluster.device.memory:
            return size
        size //= 2
    return size


def _settings(grid: Decomposition, size: int, sequence: int) -> ParallelConfig:
    return _on(grid.data, grid.z, grid.y, grid.x, size * grid.data, sequence, grid.ways)


def _on(data: Any, z: Any, y: Any, x: Any, samples: Any, sequence: int, ways: int) -> ParallelConfig:
    rank_stride = {"x": 1, "y": x, "z": x * y, "data": x * y * z, "pipe": x * y * z * data}
    return ParallelConfig(
        data=data, z=z, y=y, x=x, samples=samples, sequence=sequence, sharded=False, weights=FREED, ways=ways,
        item=ITEM, gradients="float32", rank_stride=rank_stride,
    )  # fmt: skip
