"""The closed form of a worker's peak memory: the largest of a few moments of a step, for arrays of settings."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.cost_model.schedules import ScheduleModel
from cubeloom.plan.cost_model.worker_load import WorkerLoad, updating
from cubeloom.plan.hardware.software import OWN, Software


class Memory(NamedTuple):
    """Bytes of a rank, by class."""

    parameters: Any
    gradients: Any
    optimizer: Any
    activations: Any
    gathered: Any
    buffers: Any
    update: Any  # what later moments of the step need more: gradients, their reduction, the optimizer

    @property
    def total(self) -> Any:
        return sum(self, start=np.float64(0))


def memory(
    shape: ScheduleModel,
    workers: int,
    worker: int,
    count: Any,
    c: WorkerLoad,
    item: int,
    recompute: Recompute,
    software: Software = OWN,
) -> Memory:
    """Of one worker with `count` micro-batches, while most of them are in flight, and what later moments need more.

    Optimizer states are sharded over all replicas (ZeRO-1), which moves no additional bytes.
    """
    flying = shape.in_flight(workers, count, worker)
    wholly = recompute is True
    least = c.given if wholly else c.activations - c.inside if recompute else c.activations
    if workers > 1:
        # A stage keeps its output for its backward. Its input belongs to its first layer, or block.
        least = least + c.handed * shape.chunks
    kept = flying * least
    if shape.split:
        # A deferred weight gradient keeps inputs and output gradients.
        kept = kept + np.minimum(_waiting(shape, worker), flying - 1) * (c.noted - least)
    later_ones = np.asarray(count) > flying  # in flight are micro-batches after the first, whose gradients are there
    there = np.where(later_ones, c.gradients, 0.0)
    if wholly:
        backward, ends = np.where(later_ones, c.redoing, c.redoing_first), c.redoing_at_end
        most = np.maximum(np.where(later_ones, c.most_adding, c.most), backward)
    else:
        backward, ends = np.where(later_ones, c.adding, c.in_backward), c.at_end
        most = np.where(later_ones, c.most_adding, c.most)
    # After a backward of each copy of a stage all gradients exist: in the next backward, or at the end of a single one.
    ending = np.where(np.asarray(count) > shape.replicas, backward, ends)
    later = kept - shape.replicas * least + c.gradients + ending
    if shape.split:
        left, off = _put_off(shape, workers, worker, count)
        later = np.maximum(later, left * least + off * c.noted + c.gradients + 2 * c.largest)
    buffers = most + 2 * c.handed if workers > 1 else most
    states, moved = c.states * (software.state_bytes(item) / shape.replicas), 0.0
    if software.offload:
        states, moved = np.zeros_like(states), c.pair * (software.state_bytes(item) / shape.replicas)
    later = np.maximum(later, _updating(shape, c, item) + moved - (c.gathered + (buffers - most)))
    update = np.maximum(0.0, later - (kept + there + most))
    return Memory(c.weights, there, states, kept, c.gathered, buffers, update)


def _waiting(shape: ScheduleModel, worker: int) -> int:
    """The number of micro-batches in flight whose weight gradients are deferred, when most are in flight."""
    return {"zb-h1": worker, "zb-h2": 2 * worker}.get(shape.name, 0)


def _put_off(shape: ScheduleModel, workers: int, worker: int, count: Any) -> tuple[Any, Any]:
    """When most weight gradients are deferred: micro-batches before their backward, and those between its halves."""
    inward = min(worker, workers - 1 - worker) + 1
    left, off = {
        "zb-h1": (workers - 1 - worker, worker + 1),
        "zb-h2": (2 * (workers - 1 - worker), 2 * worker + 1),
        "zbv": ((workers - 1 - worker) / 2, worker + 0.5),
        "dualpipe": (0, inward),
        "dualpipev": ((workers - 1 - worker) / 2, (worker + 1) / 2),
        "chimera-zb": (0, workers),
    }.get(shape.name, (0, 0))
    off = np.minimum(off, count)
    return np.minimum(left, count - off), off


def _updating(shape: ScheduleModel, c: WorkerLoad, item: int) -> Any:
    """The most bytes besides weights and states after the last backward: gradients, their reduction, and gathered
    weights.
    """
    if shape.replicas == 1:
        return c.updating
    return updating(c.numbers, 0.0, c.states / shape.replicas, item, c.gradients / c.numbers)
