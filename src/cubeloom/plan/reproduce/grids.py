"""A step on a grid of tensor and data axes, or of Megatron-LM's tensor, pipe and data; in bfloat16.

Communication is hidden as in the closed form: the reduction of an input gradient behind the weight gradient, weight
gathers ahead; with two strands one computes while the other communicates. Gradients are reduced over data at the end,
in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cubeloom.parallel.config import FREED, ParallelConfig
from cubeloom.pipeline import Costs, generate, simulate
from cubeloom.plan import costs
from cubeloom.plan.cost_model.compute import optimizer
from cubeloom.plan.cost_model.memory import room
from cubeloom.plan.cost_model.timing import Times, times
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.model import Model
from cubeloom.plan.reproduce.report import Share

ITEM, SUMMED = 2, 4  # bytes per element, and per element of a reduced gradient
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
    """Seconds of computation on the slowest rank, exposed communication, bubbles, gradient reduction, and update."""

    grid: Decomposition
    computed: float
    exposed: float
    waited: float
    summed: float
    updated: float

    @property
    def seconds(self) -> float:
        return self.computed + self.exposed + self.waited + self.summed + self.updated

    def share(self, name: str) -> Share:
        kinds = ("computed", "exposed", "waited", "summed", "updated")
        return Share(f"{name} ({self.grid})", {kind: getattr(self, kind) for kind in kinds})


def step(model: Model, grid: Decomposition, samples: int, sequence: int, cluster: Cluster, again: bool) -> Step:
    """`samples` of the whole batch; `again`: activations are recomputed."""
    share = samples // grid.data
    size = grid.microbatch or share
    s = _settings(grid, size, sequence)
    kinds = [times(kind, s, cluster, "bf16") for kind in model.kinds]
    rows = _stages(model, grid.pipe)
    forward = tuple(_sum(kinds, row, "forward") for row in rows)
    backward = tuple(
        _sum(kinds, row, "input_grad") + _sum(kinds, row, "weight_grad") - _sum(kinds, row, "saved") for row in rows
    )
    # Recomputed matmuls are those of a forward; of its time, the part that is not communication.
    computing = [
        _sum(kinds, row, "computed") + again * min(_sum(kinds, row, "computed") / 3, f)
        for row, f in zip(rows, forward, strict=True)
    ]
    handed = size / grid.z * sequence * model.kinds[model.row[1]].outputs[0].numbers / grid.x * ITEM
    timeline = simulate(
        generate("1f1b", grid.pipe, share // size),
        Costs(
            forward,
            backward,
            (0.0,) * grid.pipe,
            message=float(costs.send(cluster, handed, grid.pipe, s.rank_stride["pipe"])),
            recompute=frozenset(range(grid.pipe)) if again else frozenset(),
        ),
    )
    pace = timeline.busy.index(timeline.ideal)
    held = [float(room(kind, s).parameters) for kind in model.kinds]
    numbers = max(sum(held[kind] for kind in row) for row in rows)
    computed = share // size * computing[pace]
    return Step(
        grid,
        computed,
        timeline.ideal - computed,
        timeline.makespan - timeline.ideal,
        float(costs.all_reduce(cluster, numbers * SUMMED, grid.data, s.rank_stride["data"])),
        float(optimizer(numbers, ITEM, cluster.device)),
    )


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


def fastest(
    model: Model, grids: Sequence[Decomposition], samples: int, sequence: int, cluster: Cluster
) -> Decomposition:
    """Of grids without a pipe, all at once: passes with recomputation, and the gradient reduction."""
    data, z, y, x = (np.array([float(getattr(grid, axis)) for grid in grids]) for axis in ("data", "z", "y", "x"))
    s = _on(data, z, y, x, samples, sequence, 1)
    total: Any = 0.0
    numbers: Any = 0.0
    for kind in sorted(set(model.row)):
        count, time = model.row.count(kind), times(model.kinds[kind], s, cluster, "bf16")
        total = total + count * (2 * time.forward + time.input_grad + time.weight_grad - time.saved)
        numbers = numbers + count * room(model.kinds[kind], s).parameters
    total = total + costs.all_reduce(cluster, numbers * SUMMED, data, s.rank_stride["data"])
    return grids[int(np.argmin(total))]


def _settings(grid: Decomposition, size: int, sequence: int) -> ParallelConfig:
    return _on(grid.data, grid.z, grid.y, grid.x, size * grid.data, sequence, grid.ways)


def _on(data: Any, z: Any, y: Any, x: Any, samples: int, sequence: int, ways: int) -> ParallelConfig:
    rank_stride = {"x": 1, "y": x, "z": x * y, "data": x * y * z, "pipe": x * y * z * data}
    return ParallelConfig(
        data=data, z=z, y=y, x=x, samples=samples, sequence=sequence, sharded=False, weights=FREED, ways=ways,
        item=ITEM, gradients="model", rank_stride=rank_stride,
    )  # fmt: skip


def _sum(kinds: list[Times], row: tuple[int, ...], what: str) -> float:
    values: list[Any] = [getattr(kinds[kind], what) for kind in row]
    return float(sum(values))


def _stages(model: Model, count: int) -> list[tuple[int, ...]]:
    """The kinds of pieces of each stage: blocks as evenly as possible, the first and the last piece at the ends."""
    if count == 1:
        return [model.row]
    first, *blocks, last = model.row
    ends = [len(blocks) * stage // count for stage in range(count + 1)]
    rows = [tuple(blocks[begin:end]) for begin, end in pairwise(ends)]
    return [(first, *rows[0]), *rows[1:-1], (*rows[-1], last)]
