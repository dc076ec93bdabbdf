"""Seconds of a step of measured runs, by the planner's own functions: the cost of pieces, memory, the simulated schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubeloom.parallel.config import FREED, KEPT, REPLICATED, ParallelConfig
from cubeloom.plan.cost_model.peak import memory
from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.cost_model.schedules import ALONE, ONE_F_ONE_B, ScheduleModel, interleaved
from cubeloom.plan.cost_model.worker_load import Pieces, carry, loads
from cubeloom.plan.hardware import uncertainty
from cubeloom.plan.model import Model
from cubeloom.plan.model.decoder import decoder
from cubeloom.plan.search.find import cost, taken
from cubeloom.plan.search.space import at
from cubeloom.plan.simulate.plans import ScheduleGroup, simulated_step
from cubeloom.plan.validate.table import Floats, Run

# Of the memory, for tensors where the source does not say what is computed again. Those programs keep activations in eight
# bits, or in the host's memory, of which the planner's account of memory knows nothing.
_ROOM = 4.0


@dataclass(frozen=True)
class Prediction:
    seconds: float
    error: float  # one standard deviation, as a share
    recompute: Recompute


def predict(runs: Sequence[Run]) -> list[Prediction]:
    """Runs of one model on one machine are costed together, those with one schedule simulated together."""
    found: dict[int, Prediction] = {}
    for places in _groups(range(len(runs)), lambda place: runs[place].costed):
        some = [runs[place] for place in places]
        model, s = decoder(some[0].sizes), _settings(some)
        pieces = cost(model, s, some[0].cluster, some[0].dtype)
        for spots in _groups(range(len(some)), lambda spot: some[spot].scheduled):  # noqa: B023
            index = np.array(spots)
            own = taken(pieces, (index,), s.z.shape, at(s, index))
            for spot, each in zip(spots, _scheduled(some[spots[0]], model, own), strict=True):
                found[places[spot]] = each
    return [found[place] for place in range(len(runs))]


def _groups(places: Sequence[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for place in places:
        found[key(place)].append(place)
    return list(found.values())


def _scheduled(run: Run, model: Model, pieces: Pieces) -> list[Prediction]:
    """Of runs like this one, but for their sizes along the axes and their micro-batch."""
    shape = _schedule(run)
    chosen = _recomputed(run, model, shape, pieces)
    seconds, exposed = np.zeros(len(chosen)), np.zeros(len(chosen))

    def simulated(recompute: Recompute) -> Any:
        alike = ScheduleGroup(shape, run.pipe, run.microbatches, recompute)
        return simulated_step(model, run.cluster, pieces, alike)

    for place, recompute in enumerate(run.recompute):
        here = chosen == place
        if np.any(here):
            found = simulated(recompute)
            took = found.seconds
            if run.share < 1:
                took = run.share * took + (1 - run.share) * simulated(False).seconds
            seconds, exposed = np.where(here, took, seconds), np.where(here, found.exposed, exposed)
    return [
        Prediction(float(took), uncertainty(run.cluster, float(share)), run.recompute[place])
        for took, share, place in zip(seconds, exposed, chosen, strict=True)
    ]


def _recomputed(run: Run, model: Model, shape: ScheduleModel, pieces: Pieces) -> Any:
    """For each run the first of what may be computed again with which it fits; the last, where none does."""
    last = len(run.recompute) - 1
    chosen = np.full(len(pieces.settings.z), last)
    held = loads(model, shape, run.pipe) if last else ()
    carried = carry(held, pieces)
    for place in range(last - 1, -1, -1):
        most: Any = 0.0
        for load, c in zip(held, carried, strict=True):
            item, count = pieces.settings.item, float(run.microbatches)
            most = np.maximum(most, memory(shape, run.pipe, load.first, count, c, item, run.recompute[place]).total)
        chosen = np.where(most <= run.cluster.device.memory * _ROOM, place, chosen)
    return chosen


def _schedule(run: Run) -> ScheduleModel:
    if run.pipe == 1:
        return ALONE
    in_rounds = run.microbatches % max(1, run.microbatches // run.pipe) == 0
    return interleaved(run.chunks) if run.chunks > 1 and in_rounds else ONE_F_ONE_B


def _settings(runs: Sequence[Run]) -> ParallelConfig:
    """The tensor axis is innermost, then the shards of weights, data and the pipeline, as in Megatron-LM and torch."""

    def each(name: str) -> Floats:
        return np.array([float(getattr(run, name)) for run in runs])

    first, no = runs[0], np.zeros(len(runs), bool)
    data, z, y, one = each("data"), each("shards"), each("tensor"), np.ones(len(runs))
    return ParallelConfig(
        data=data, z=z, y=y, x=one, samples=each("microbatch") * data * z, sequence=first.sizes.sequence,
        sharded=each("sharded") > 0, regathered=no, ways=one, record=False,
        weights=np.where(z > 1, np.where(each("kept") > 0, KEPT, FREED), REPLICATED),
        gradients="float32" if first.wide else "model",
        rank_stride={"x": one, "y": one, "z": y, "data": y * z, "pipe": y * z * data},
    )  # fmt: skip
