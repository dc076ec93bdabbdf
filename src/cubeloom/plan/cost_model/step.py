"""The closed form of a whole step's time, from what workers carry, for a schedule and arrays of settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cubeloom.parallel.config import REPLICATED, ParallelConfig
from cubeloom.plan import costs
from cubeloom.plan.cost_model.compute import optimizer
from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.cost_model.schedules import ScheduleModel
from cubeloom.plan.cost_model.timing import Times
from cubeloom.plan.cost_model.worker_load import BUCKET, WorkerLoad, most_of
from cubeloom.plan.hardware import Cluster


def passes(shape: ScheduleModel, times: Times, recompute: Recompute) -> tuple[Any, Any, Any]:
    """Seconds of a forward, of an input gradient and of a weight gradient, as the schedule runs them."""
    i, saved = (times.redone, times.redone_saved) if recompute is True else (times.input_grad, times.saved)
    if recompute == "attention":
        i = i + times.attention
    return times.forward, i if shape.split else i - saved, times.weight_grad


def computed(times: Times, recompute: Recompute) -> Any:
    """What of all passes is computation: what is recomputed, too."""
    if not recompute:
        return times.computed
    return times.computed + (times.attention if recompute == "attention" else times.recomputed)


def pipelined(shape: ScheduleModel, workers: int, count: Any, f: Any, i: Any, w: Any) -> Any:
    """Seconds of the pipeline without messages: what a worker computes and waits for; at least one micro-batch alone."""
    alone = workers * (f + i) + (w if shape.split else workers * w)
    return np.maximum(count * (f + i + w) + shape.bubble(workers, count, f, i, w), alone)


_TENSOR = 64e6  # bytes: the usual weight of a model of some billions of parameters
_LAST = 0.04  # of the weights: those that the first layers wait for


class Step(NamedTuple):
    """Seconds. `computed`, `bubble` and `exposed` make the step."""

    seconds: Any
    computed: Any
    bubble: Any
    exposed: Any
    message: Any
    reduction: Any  # of gradients: each rank gets the sum of its share
    update: Any  # of that share, and the gather of all shares


def step(
    shape: ScheduleModel,
    workers: int,
    count: Any,
    carried: Sequence[WorkerLoad],
    s: ParallelConfig,
    cluster: Cluster,
    recompute: Recompute,
) -> Step:
    """Chimera's equation 1, for every schedule: the busiest worker's passes, the bubble, messages, the sum of gradients."""
    f, i, w, each = busiest(shape, carried, recompute)
    numbers = most_of([c.numbers for c in carried])
    hop, reduction, gather = network(shape, workers, carried[0].handed, numbers, s, cluster)
    free = most_of([c.times.free for c in carried])
    left = behind(reduction, numbers * s.gradient, free, s, cluster)
    states = _updated(shape, numbers, most_of([c.states for c in carried]), s, cluster)
    own_share = optimizer(states, s.item, cluster.device, cluster.software)
    update = own_share + ahead(gather, f, cluster) + cluster.software.step
    pipeline = pipelined(shape, workers, count, f, i, w)
    own = count * each + own_share
    late = own * stragglers(workers, s, cluster)
    total = pipeline + shape.messages(workers, count) * hop + left + update + late
    bubble = pipeline - count * (f + i + w) + late + cluster.software.step
    return Step(total, own, bubble, total - own - bubble, hop, reduction, update)


def ahead(gather: Any, forward: Any, cluster: Cluster) -> Any:
    """Seconds of a gather of updated weights that the next step's first forward does not hide."""
    if not cluster.software.hides_gather:
        return gather
    return np.maximum(_LAST * gather, costs.exposed(forward, gather, cluster.nic_drag))


def stragglers(workers: int, s: ParallelConfig, cluster: Cluster) -> Any:
    """By how much the slowest device is slower than the mean: the largest of so many normal deviates."""
    ranks = workers * s.data * s.z * s.y * s.x
    return cluster.jitter * np.sqrt(2 * np.log(ranks))


def busiest(shape: ScheduleModel, carried: Sequence[WorkerLoad], recompute: Recompute) -> tuple[Any, Any, Any, Any]:
    """Forward, input gradient, weight gradient, and what is computed of them, of the worker that has most to do."""
    worst: list[Any] = []
    for c in carried:
        here = [*passes(shape, c.times, recompute), computed(c.times, recompute)]
        if worst:
            more = here[0] + here[1] + here[2] > worst[0] + worst[1] + worst[2]
            here = [np.where(more, new, old) for new, old in zip(here, worst, strict=True)]
        worst = here
    f, i, w, own = worst
    return f, i, w, own


def network(
    shape: ScheduleModel, workers: int, handed: Any, numbers: Any, s: ParallelConfig, cluster: Cluster
) -> tuple[Any, Any, Any]:
    """Seconds of a message between stages, of the sum of a worker's gradients, and of the gather of its updated weights."""
    group, rank_stride = replicas(shape, s)
    sharing = _sharing(group, cluster)
    weights = numbers * s.item
    count = _messages(weights, sharing, cluster)
    return (
        message(workers, handed, s, cluster),
        summed(shape, numbers * s.gradient, s, cluster),
        count * costs.all_gather(cluster, weights / count, sharing, rank_stride),
    )


def summed(shape: ScheduleModel, nbytes: Any, s: ParallelConfig, cluster: Cluster) -> Any:
    """Seconds of the sum of gradients, of which each rank gets its share; all of it, where fewer ranks divide the update."""
    group, rank_stride = replicas(shape, s)
    sharing = _sharing(group, cluster)
    count = np.maximum(_messages(nbytes, sharing, cluster), np.ceil(nbytes / (cluster.software.bucket or np.inf)))
    once = count * costs.reduce_scatter(cluster, nbytes / count, group, rank_stride)
    return once * np.where(np.less(sharing, group), 2.0, 1.0)


def _sharing(group: Any, cluster: Cluster) -> Any:
    """Ranks that divide an update."""
    return np.minimum(group, cluster.software.zero_ranks or group)


def _messages(nbytes: Any, sharing: Any, cluster: Cluster) -> Any:
    """To or from each owner of whole tensors, of which few are larger than `_TENSOR`; one, where all ranks share each."""
    if not cluster.software.owns_tensors:
        return 1.0
    return np.maximum(1.0, np.minimum(sharing, np.ceil(nbytes / _TENSOR)))


def _updated(shape: ScheduleModel, numbers: Any, states: Any, s: ParallelConfig, cluster: Cluster) -> Any:
    """Parameters that a rank updates."""
    software = cluster.software
    if not software.zero:
        return numbers
    return numbers / _sharing(replicas(shape, s)[0], cluster) if software.zero_ranks else states / shape.replicas


def behind(reduction: Any, nbytes: Any, free: Any, s: ParallelConfig, cluster: Cluster) -> Any:
    """Seconds of a reduction that no computation hides: it runs behind the last backward, but for its last bucket.

    A stage that is recorded computes its backward as a whole, and its gradients are reduced behind that.
    """
    hiding = np.where(s.recorded, 0.0, free) if cluster.software.hides_reduction else 0.0
    last = reduction * np.minimum(1.0, (cluster.software.bucket or BUCKET) / np.maximum(nbytes, 1.0))
    late = np.maximum(last, costs.exposed(hiding, reduction, cluster.nic_drag))
    return np.where(np.asarray(reduction) > 0, late, 0.0)


def message(workers: int, handed: Any, s: ParallelConfig, cluster: Cluster) -> Any:
    """Seconds to hand a micro-batch to the next stage."""
    if workers == 1:
        return 0.0 * handed
    if not cluster.software.hands_shards:
        return costs.send(cluster, handed, workers, s.rank_stride["pipe"])
    copies = np.where(s.sharded, 1.0, s.y)
    gather = costs.all_gather(cluster, handed, copies, s.rank_stride["y"])
    return costs.send(cluster, handed / copies, workers, s.rank_stride["pipe"]) + gather


def replicas(shape: ScheduleModel, s: ParallelConfig) -> tuple[Any, Any]:
    """How many ranks sum the gradients of a weight, and how far apart they lie."""
    z = np.where(s.weights == REPLICATED, s.z, 1)
    rank_stride = np.where(
        z > 1, s.rank_stride["z"], np.where(np.asarray(s.data) > 1, s.rank_stride["data"], s.rank_stride["pipe"])
    )
    return s.data * z * shape.replicas, rank_stride
