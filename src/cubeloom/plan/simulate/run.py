"""A step of a pipeline under given times, for many plans or many ranks at once: every time is an array, and so is every result.

The rows of a schedule fix the order, so that one walk through them serves all: each action starts when its worker is free and
what it needs has arrived. Gradients are summed as soon as all replicas of a stage have theirs, behind what is still computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cubeloom.pipeline import Schedule
from cubeloom.plan.costs import Quantity
from cubeloom.plan.simulate.waves import waves

Array = NDArray[Any]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on each stage, [stages, …]; a backward is both gradients in one."""

    forward: Array
    backward: Array
    input_grad: Array
    weight_grad: Array
    message: Quantity  # […]
    reduction: Array  # of a stage's gradients over its replicas


@dataclass(frozen=True)
class Ranks:
    """Where the arrays are ranks: how slow each computes, and who waits for whom."""

    slowness: Array  # [workers, …]
    layers: Callable[[Array], Array]  # when all that meet in a layer's collectives are done
    gradients: Callable[[Array], Array]  # when all that sum gradients are


@dataclass(frozen=True)
class Outcome:
    seconds: Array  # […], with the sums of gradients
    pipeline: Array  # until the last worker has computed all
    busy: Array  # [workers, …]


def simulate(schedule: Schedule, times: StageTimes, ranks: Ranks | None = None) -> Outcome:
    shape = np.broadcast_shapes(times.forward.shape[1:], np.shape(times.message))
    if ranks is not None:
        shape = ranks.slowness.shape[1:]
    # [kinds · stages, …], with room for the shape of ranks.
    each = np.concatenate([times.forward, times.backward, times.input_grad, times.weight_grad])
    each = each.reshape(each.shape + (1,) * (1 + len(shape) - each.ndim))
    order = waves(schedule)
    ends = np.zeros((order.count + 1, *shape))  # of each action; the last one is no action, and ends before all others
    ends[-1] = -np.inf
    free = np.zeros((len(schedule.workers), *shape))
    busy = np.zeros_like(free)
    wide = (-1,) + (1,) * len(shape)
    for wave in order.waves:
        sizes = wave.sizes.reshape(wide)
        arrives = ends[wave.waits] + times.message * sizes
        spent = each[wave.work] * sizes
        if ranks is not None:
            spent = spent * ranks.slowness[wave.workers]
        end = np.maximum(free[wave.workers], arrives) + spent
        if ranks is not None:
            end = ranks.layers(end)
        ends[wave.actions] = end
        free[wave.workers] = end
        busy[wave.workers] += spent
    done = {home: ends[number] for home, number in order.last.items()}
    if ranks is not None:
        done = {home: ranks.gradients(end) for home, end in done.items()}
    pipeline = free.max(axis=0)
    return Outcome(np.maximum(pipeline, _summed(times, done, shape)), pipeline, busy)


def _summed(times: StageTimes, done: dict[tuple[int, int], Array], shape: tuple[int, ...]) -> Array:
    """When the last sum of gradients ends. A worker's network is given to its stages one after the other, as they are done."""
    members: dict[int, list[int]] = {}
    for stage, worker in done:
        members.setdefault(stage, []).append(worker)
    launched = {s: np.maximum.reduce([done[s, w] for w in workers]) for s, workers in members.items()}
    network: dict[int, Array] = {}
    last = np.zeros(shape)
    for stage in sorted(launched, key=lambda stage: float(np.mean(launched[stage]))):
        start = launched[stage]
        for worker in members[stage]:
            start = np.maximum(start, network.get(worker, start))
        end = start + times.reduction[stage]
        for worker in members[stage]:
            network[worker] = end
        last = np.maximum(last, end)
    return last
