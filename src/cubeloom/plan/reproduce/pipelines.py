"""A pipeline as in a paper: W copies of D stages with micro-batches of B samples; its step time and memory on a
cluster.

Stages have equal numbers of blocks, as in Chimera's code; the embedding is before the first and the head after the
last. Each is timed from the list of layers, the schedule is simulated, and gradients are reduced over all copies of a
stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cubeloom.base.errors import UserError
from cubeloom.pipeline import Costs, Schedule, Sync, Timeline, Updates, generate, simulate, synchronised
from cubeloom.plan import costs
from cubeloom.plan.cost_model.compute import optimizer
from cubeloom.plan.hardware import Cluster, Device
from cubeloom.plan.model import Model, load
from cubeloom.plan.reproduce.eager import ITEM, Part, part

_STATES = 3  # copies of the weights besides the weights: gradient and Adam's two moments


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The experiment: `width` W, `depth` D, `size` B; `batch` is B^, the samples of a step over all pipelines."""

    scheme: str
    schedule: str  # its name in `pipeline.schedules`
    model: str
    sequence: int
    width: int
    depth: int
    size: int
    batch: int
    mode: str | None = None  # of Chimera with more micro-batches than stages
    sync: Sync = Sync.EAGER_OPT  # for the bidirectional schedules

    @property
    def nodes(self) -> int:
        return self.width * self.depth

    @property
    def microbatches(self) -> int:
        count, rest = divmod(self.batch, self.width * self.size)
        if rest or not count:
            raise UserError(
                f"{self.scheme}: a batch of {self.batch} is not made of whole micro-batches of {self.size} "
                f"on {self.width} pipelines; the nearest is {max(1, count) * self.width * self.size}"
            )
        return count


@dataclass(frozen=True)
class Run:
    """Seconds of a step on the slowest worker, by what they are spent on; and the largest memory of a worker, in bytes."""

    setup: Setup
    recompute: bool
    seconds: float
    computed: float
    waited: float  # bubbles and messages
    summed: float  # exposed gradient reduction
    update: float
    memory: float

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.setup.batch / self.seconds


def run(setup: Setup, cluster: Cluster, growth: float, recompute: bool | None = None) -> Run:
    """`growth`: bytes of memory per byte of activations. Recomputes only if it does not fit otherwise."""
    if recompute is None:
        plain = run(setup, cluster, growth, recompute=False)
        return plain if plain.memory <= cluster.device.memory else run(setup, cluster, growth, recompute=True)
    schedule = _schedule(setup)
    stage_costs = stages(setup, cluster, schedule.replicas, recompute, growth)
    if schedule.updates is Updates.FLUSH:
        return _synchronous(setup, schedule, stage_costs, cluster.device)
    return _endless(setup, schedule, stage_costs, cluster.device)


def fits(setup: Setup, cluster: Cluster, growth: float) -> bool:
    return run(setup, cluster, growth, recompute=False).memory <= cluster.device.memory


def stages(setup: Setup, cluster: Cluster, replicas: int, recompute: bool, growth: float = 1.0) -> Costs:
    """Of one micro-batch on each stage: seconds, and bytes as `activation` and `weights`."""
    model = load(setup.model)
    kinds = [part(kind, setup.size, setup.sequence, cluster.device) for kind in model.kinds]
    rows = [_sum([kinds[kind] for kind in stage]) for stage in _even(model, setup.depth)]
    handed = kinds[model.row[1]].handed
    group = setup.width * replicas
    return Costs(
        forward=tuple(each.forward for each in rows),
        input_grad=tuple(each.backward / 2 for each in rows),
        weight_grad=tuple(each.backward / 2 for each in rows),
        message=_staged(handed, cluster) + float(costs.send(cluster, handed, setup.depth)),
        activation=tuple(each.activations * growth for each in rows),
        weights=tuple(each.numbers * ITEM for each in rows),
        reduce=tuple(_reduction(each.numbers * ITEM, group, cluster) for each in rows),
        drag=cluster.nic_drag,
        recompute=frozenset(range(setup.depth)) if recompute else frozenset(),
        boundary=min(1.0, handed / (growth * rows[setup.depth // 2].activations)),
    )


def _staged(nbytes: float, cluster: Cluster) -> float:
    """gloo sends from the host's memory: a copy down before and a copy up after."""
    return 2 * nbytes / cluster.link_bandwidth


def _reduction(nbytes: float, group: int, cluster: Cluster) -> float:
    """As in the paper's model, by recursive halving and doubling (Rabenseifner)."""
    return _staged(nbytes, cluster) + float(costs.all_reduce(cluster, nbytes, group, algorithm="halving"))


def _even(model: Model, depth: int) -> list[list[int]]:
    """The kinds of the pieces of each stage."""
    first, *blocks, last = model.row
    each, rest = divmod(len(blocks), depth)
    if rest:
        raise UserError(f"{model.name}: {len(blocks)} blocks cannot be cut into {depth} equal stages")
    found = [blocks[stage * each : (stage + 1) * each] for stage in range(depth)]
    found[0] = [first, *found[0]]
    found[-1] = [*found[-1], last]
    return found


def _sum(parts: list[Part]) -> Part:
    return Part(*(sum(column) for column in zip(*parts, strict=True)))


@cache
def _generated(name: str, depth: int, microbatches: int, mode: str | None) -> Schedule:
    return generate(name, depth, microbatches, mode=mode)


def _schedule(setup: Setup) -> Schedule:
    if setup.schedule.startswith("pipedream"):
        # Long enough to be in steady state; for PipeDream-2BW in whole groups.
        return _generated(setup.schedule, setup.depth, 4 * setup.depth, None)
    return _generated(setup.schedule, setup.depth, setup.microbatches, setup.mode)


def _synchronous(setup: Setup, schedule: Schedule, stage_costs: Costs, device: Device) -> Run:
    if schedule.replicas > 1:
        schedule = synchronised(schedule, setup.sync, stage_costs)
    timeline = simulate(schedule, stage_costs)
    ends = [row[-1].end for row in timeline.spans]
    last = max(ends)
    update = max(_update(_held(timeline, worker), device) for worker in range(len(ends)))
    pace = ends.index(last)
    return Run(
        setup,
        bool(stage_costs.recompute),
        timeline.makespan + update,
        timeline.busy[pace],
        last - timeline.busy[pace],
        timeline.makespan - last,
        update,
        _memory(timeline),
    )


def _endless(setup: Setup, schedule: Schedule, stage_costs: Costs, device: Device) -> Run:
    """Without a flush: the time of one more segment of the stream. Every worker reduces its gradients before it
    continues.

    PipeDream does so after each micro-batch, PipeDream-2BW after all of a step.
    """
    half = _generated(schedule.name, schedule.stages, schedule.microbatches // 2, None)
    timeline = simulate(schedule, stage_costs)
    shorter = simulate(half, stage_costs).makespan
    interval = (timeline.makespan - shorter) / (schedule.microbatches - half.microbatches)
    count = setup.microbatches
    updates = count if schedule.updates is Updates.NEWEST else 1
    paces = []
    for worker in range(len(schedule.workers)):
        ((_, stage),) = schedule.held_by(worker)
        busy = count * timeline.busy[worker] / schedule.microbatches
        update = updates * _update(_held(timeline, worker), device)
        paces.append(
            (busy + updates * stage_costs.reduce[stage] + update, busy, updates * stage_costs.reduce[stage], update)
        )
    seconds, busy, summed, update = max(paces)
    waited = max(0.0, count * interval - seconds)
    return Run(setup, bool(stage_costs.recompute), seconds + waited, busy, waited, summed, update, _memory(timeline))


def _held(timeline: Timeline, worker: int) -> float:
    """Bytes of one version of a worker's weights."""
    return sum(timeline.costs.weights[stage] for _, stage in timeline.schedule.held_by(worker))


def _update(nbytes: float, device: Device) -> float:
    return float(optimizer(nbytes / ITEM, ITEM, device))


def _memory(timeline: Timeline) -> float:
    """Bytes of the worker that needs most: activations, versions of weights, gradients and moments."""
    return max(
        activations + max(level for _, level in versions) + _STATES * _held(timeline, worker)
        for worker, (activations, versions) in enumerate(zip(timeline.peak_activations, timeline.weights, strict=True))
    )
