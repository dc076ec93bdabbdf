"""The best plans of the closed form, simulated: stages as they are and not as they are in the mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubeloom.plan import costs
from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.cost_model.schedules import ScheduleModel
from cubeloom.plan.cost_model.step import behind, replicas
from cubeloom.plan.cost_model.worker_load import Pieces
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.model import Model
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
    message = (
        costs.send(cluster, pieces.handed, alike.workers, s.rank_stride["pipe"]) if alike.workers > 1 else 0.0 * s.z
    )
    whole = np.asarray(costs.reduce_scatter(cluster, numbers * s.gradient, *replicas(alike.shape, s)))
    free = each([time.free for time in pieces.times])
    reduction = behind(whole, numbers * s.gradient, free, s, cluster)
    return StageTimes(f, i + w - saved, i, w, message, reduction)
