"""The best plans of the closed form, simulated: stages as they are and not as they are in the mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.cost_model.schedules import ScheduleModel
from cubeloom.plan.cost_model.step import behind, message, step, stragglers, summed
from cubeloom.plan.cost_model.worker_load import Pieces, carry, loads
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.model import Model
from cubeloom.plan.simulate.fold import folded
from cubeloom.plan.simulate.run import StageTimes


@dataclass(frozen=True)
class ScheduleGroup:
    """Plans that one walk through a schedule serves."""

    shape: ScheduleModel
    workers: int
    microbatches: int
    recompute: Recompute


def stage_times(model: Model, alike: ScheduleGroup, pieces: Pieces, cluster: Cluster) -> StageTimes:
    """Of all stages, from the pieces that each has; arrays over the plans."""
    rows = model.stages(alike.workers * alike.shape.chunks)
    s = pieces.settings

    def each(values: Sequence[Any]) -> Any:
        return np.asarray(rows, dtype=float) @ np.stack([np.broadcast_to(value, s.z.shape) for value in values])

    redone = ("redone", "redone_saved") if alike.recompute is True else ("input_grad", "saved")
    names = ("forward", redone[0], "weight_grad", redone[1])
    f, i, w, saved = (each([getattr(time, name) for time in pieces.times]) for name in names)
    ends = model.cuts[len(rows)]
    first, last = ([model.row[place] for place in places] for places in ((0, *ends[:-1]), [end - 1 for end in ends]))
    f = f + np.stack([np.broadcast_to(pieces.times[kind].first, s.z.shape) for kind in first])
    i = i + np.stack([np.broadcast_to(pieces.times[kind].last, s.z.shape) for kind in last])
    numbers = each([room.parameters for room in pieces.rooms])
    if alike.recompute == "attention":
        i = i + each([time.attention for time in pieces.times])
    hop = message(alike.workers, pieces.handed, s, cluster) + 0.0 * s.z
    whole = np.asarray(summed(alike.shape, numbers * s.gradient, s, cluster))
    free = each([time.free for time in pieces.times])
    reduction = behind(whole, numbers * s.gradient, free, s, cluster)
    return StageTimes(f, i + w - saved, i, w, hop, reduction)


class Simulated(NamedTuple):
    seconds: Any
    computed: Any  # by the busiest worker
    waited: Any  # by it, for others that compute

    @property
    def exposed(self) -> Any:
        """The share of the step in which nothing but communication goes on."""
        return np.maximum(0.0, 1 - (self.computed + self.waited) / self.seconds)


def simulated_step(model: Model, cluster: Cluster, pieces: Pieces, alike: ScheduleGroup) -> Simulated:
    """A step action by action; of the closed form the update and stragglers stay."""
    outcome = folded(alike.shape, alike.workers, alike.microbatches, stage_times(model, alike, pieces, cluster))
    carried = carry(loads(model, alike.shape, alike.workers), pieces)
    s, count = pieces.settings, float(alike.microbatches)
    closed = step(alike.shape, alike.workers, count, carried, s, cluster, alike.recompute)
    late = closed.computed * stragglers(alike.workers, s, cluster)
    waited = outcome.pipeline - outcome.busy.max(axis=0) + late + cluster.software.step
    return Simulated(outcome.seconds + closed.update + late, closed.computed, waited)
