"""Everything that a plan can choose: as meshes, in which every choice has an axis of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cubeloom.base.divisors import divisors
from cubeloom.base.grid import Grid
from cubeloom.parallel.config import FREED, KEPT, REPLICATED, GradientDtype, ParallelConfig, Precision
from cubeloom.plan.hardware import Cluster

Array = NDArray[Any]
WAYS = (1, 2)
AXES = ("pipe", "data", "z", "y", "x")


@dataclass(frozen=True)
class Task:
    """What is to be trained, on how many devices."""

    samples: int
    sequence: int
    devices: int
    item: int = 2
    reserve: float = 0.08  # of a device's memory, for what lies below tensors
    record: bool = False  # stages as CUDA graphs, where that is possible
    gradients: GradientDtype = "float32"  # in which they are accumulated and reduced
    precision: Precision = "model"  # of the operands of linears

    def room(self, cluster: Cluster) -> float:
        """Bytes of a device that tensors may take."""
        return cluster.device.memory * (1 - self.reserve)


@dataclass(frozen=True)
class Space:
    """The mesh [cube, micro-batch, activations, weights, inputs, ways], of those choices that differ.

    A cube is z × y × x and the order of these axes on the ranks; data and pipe lie outside it. `sizes` of a micro-batch are
    samples of one rank of data and z.
    """

    task: Task
    cubes: Array  # [cubes, 3]: z, y, x
    rank_stride: Array  # [cubes, 3]: ranks between neighbours along each
    sizes: Array
    settings: ParallelConfig
    distinct: Array  # [mesh]: not the same as another choice


@dataclass(frozen=True)
class Part:
    """A part of the space: one cube, these pipelines; of schedules, weights and activations those that are named."""

    cube: tuple[int, int, int]  # z, y, x
    pipes: tuple[int, ...]
    schedules: tuple[str, ...] = ()
    weights: int | None = None
    sharded: bool | None = None

    @classmethod
    def on(cls, grid: Grid) -> Part:
        return cls((grid.z, grid.y, grid.x), (grid.pipe,))

    def chosen(self, s: ParallelConfig) -> Any:
        weights = True if self.weights is None else s.weights == self.weights
        return weights & (True if self.sharded is None else s.sharded == self.sharded)


def space(task: Task, per_node: int, only: Part | None = None) -> Space:
    """All of it, or a part."""
    cubes, rank_stride = [], []
    for z in divisors(task.devices):
        for y in divisors(task.devices // z):
            for x in divisors(task.devices // z // y):
                if only and only.cube != (z, y, x):
                    continue
                for apart in _orders((z, y, x), per_node):
                    cubes.append((z, y, x))
                    rank_stride.append(apart)
    sizes = np.array(divisors(task.samples), dtype=float)
    grid, apart_of = np.array(cubes, dtype=float), np.array(rank_stride, dtype=float)
    depth, height, width = (_along(0, grid[:, i]) for i in range(3))
    settings = ParallelConfig(
        data=1.0,
        z=depth,
        y=height,
        x=width,
        samples=_along(1, sizes) * depth,
        sequence=task.sequence,
        sharded=_along(2, np.array([True, False])),
        weights=_along(3, np.array([FREED, KEPT, REPLICATED])),
        regathered=_along(4, np.array([False, True])),
        ways=_along(5, np.array(WAYS, dtype=float)),
        item=task.item,
        gradients=task.gradients,
        precision=task.precision,
        record=task.record,
        rank_stride={
            "z": _along(0, apart_of[:, 0]), "y": _along(0, apart_of[:, 1]), "x": _along(0, apart_of[:, 2]),
            "data": depth * height * width, "pipe": depth * height * width,
        },
    )  # fmt: skip
    chosen = distinct(settings)
    return Space(task, grid, apart_of, sizes, settings, chosen & only.chosen(settings) if only else chosen)


def _along(axis: int, values: Array) -> Array:
    return values.reshape([-1 if place == axis else 1 for place in range(6)])


def _orders(sizes: tuple[int, ...], per_node: int) -> set[tuple[int, ...]]:
    """How far apart neighbours along each axis can lie. Beyond a node all distances are alike, so that few orders differ."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in permutations(range(len(sizes))):
        apart, within = [0] * len(sizes), 1
        for axis in order:
            apart[axis] = within if sizes[axis] > 1 else 1
            within *= sizes[axis]
        found.setdefault(tuple(min(each, per_node) for each in apart), tuple(apart))
    return set(found.values())


def distinct(s: ParallelConfig) -> Array:
    """Leaves out what makes no difference: weights at rest where z is 1, and all of activations where x and y are."""
    plane = s.x * s.y > 1
    same_weights = (s.z == 1) & (s.weights != FREED)
    same_activations = ~plane & ~s.sharded
    same_inputs = s.regathered & (~plane | ~s.sharded)
    idle_strands = (s.ways > 1) & ~plane
    return np.asarray(~(same_weights | same_activations | same_inputs | idle_strands))


def found_distinct(s: ParallelConfig) -> Array:
    """The same for a model whose cut is found: its activations rest replicated."""
    same_weights = (s.z == 1) & (s.weights != FREED)
    idle_strands = (s.ways > 1) & (s.x * s.y == 1)
    return np.asarray(~(same_weights | s.sharded | s.regathered | idle_strands))


@cache
def placements(sizes: tuple[int, ...], per_node: int) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Every order of the axes, outermost first, that differs; with how far apart neighbours lie along pipe, data, z, y, x."""
    found: dict[tuple[int, ...], tuple[tuple[str, ...], tuple[int, ...]]] = {}
    for order in permutations(range(len(AXES))):
        apart, within = [1] * len(AXES), 1
        for axis in reversed(order):
            apart[axis] = within if sizes[axis] > 1 else 1
            within *= sizes[axis]
        found.setdefault(tuple(min(each, per_node) for each in apart), (tuple(AXES[a] for a in order), tuple(apart)))
    return list(found.values())


def flat(s: ParallelConfig, index: tuple[Array, ...], shape: tuple[int, ...], **changes: Any) -> ParallelConfig:
    """The settings at these places of the mesh, one after the other."""

    def at(values: Any) -> Any:
        return np.broadcast_to(values, shape)[index] if isinstance(values, np.ndarray) else values

    names = ("z", "y", "x", "samples", "sharded", "weights", "regathered", "ways")
    return replace(s, **{name: at(getattr(s, name)) for name in names}, **changes)


def at(s: ParallelConfig, index: Array) -> ParallelConfig:
    """Some of settings that stand one after the other."""
    names = ("data", "z", "y", "x", "samples", "sharded", "weights", "regathered", "ways")
    rank_stride = {axis: values[index] for axis, values in s.rank_stride.items()}
    record = s.record[index] if isinstance(s.record, np.ndarray) else s.record
    return replace(s, rank_stride=rank_stride, record=record, **{name: getattr(s, name)[index] for name in names})
