"""From candidates of the closed form to plans: every placement of the best, then the simulator's time for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, groupby
from statistics import median
from typing import Any

import numpy as np

from cubeloom.base.grid import Grid
from cubeloom.parallel.config import ParallelConfig
from cubeloom.plan.cost_model.peak import memory
from cubeloom.plan.cost_model.step import step
from cubeloom.plan.cost_model.worker_load import Pieces, carry, loads
from cubeloom.plan.hardware import Cluster, Dtype, uncertainty
from cubeloom.plan.model import Model, with_stages
from cubeloom.plan.search.best import Candidate
from cubeloom.plan.search.find import cost, taken
from cubeloom.plan.search.found import Plan
from cubeloom.plan.search.space import AXES, Task, at, placements
from cubeloom.plan.simulate.fold import actions
from cubeloom.plan.simulate.plans import ScheduleGroup, simulated_step, stage_times
from cubeloom.plan.simulate.run import StageTimes

ACTIONS = 60_000  # that a search simulates, a third of a second's: schedules of the best plans first
MORE = 4 * ACTIONS  # that it simulates besides, so that all plans that are shown were simulated
SURE = 10  # plans that are shown: in closed form, nothing left out is faster than they are


def refined(
    model: Model, cluster: Cluster, task: Task, dtype: Dtype, plans: Sequence[Plan], simulated: int
) -> list[Plan]:
    """Plans in the order of their times, the best first: of the first `simulated` as many as possible have the simulator's.

    A schedule that takes more actions than are left is passed over, and others that take fewer follow. Then come those among
    the first SURE that were passed over. What remains without simulation takes its place by the closed form's time, corrected
    by what simulation changed in the others.
    """
    if not plans:
        return []
    if model.others:
        first = plans[:simulated]
        lying = [[plan for plan in first if model.on(plan.grid.x, plan.grid.y) is each] for each in model.variants]
        timed = [
            refined(replace(variant, others=()), cluster, task, dtype, some, simulated)
            for variant, some in zip(model.variants, lying, strict=True)
        ]
        return [*sorted(chain(*timed), key=lambda plan: plan.seconds), *plans[simulated:]]
    found = list(plans[:simulated])
    candidates = [as_candidate(plan) for plan in found]
    apart = [[int(plan.rank_stride[axis]) for axis in AXES] for plan in found]
    pieces = cost(model, settings_of(candidates, apart, task), cluster, dtype)
    groups = sorted(_groups(candidates), key=lambda group: min(group[1]))
    left, passed_over = ACTIONS, []
    for alike, places in groups:
        needed = actions(alike.shape, alike.workers, alike.microbatches)
        if needed > left and min(places) > 0:
            passed_over.append((needed, alike, places))
            continue
        left -= needed
        _simulate(model, cluster, pieces, alike, places, found)
    left = MORE
    for needed, alike, places in passed_over:
        shown = set(_order(found)[:SURE])
        if needed <= left and not shown.isdisjoint(places):
            left -= needed
            _simulate(model, cluster, pieces, alike, places, found)
    return [*(found[place] for place in _order(found)), *plans[simulated:]]


def _order(plans: Sequence[Plan]) -> list[int]:
    """Places of the plans, the fastest first."""
    ratio = median(plan.seconds / plan.closed for plan in plans if plan.simulated)

    def seconds(place: int) -> float:
        plan = plans[place]
        return plan.seconds if plan.simulated else plan.closed * ratio

    return sorted(range(len(plans)), key=seconds)


def placed(model: Model, cluster: Cluster, task: Task, dtype: Dtype, candidates: Sequence[Candidate]) -> list[Plan]:
    """Each candidate with the order of the axes on the ranks that is fastest; the best first."""
    if not candidates:
        return []
    if model.others:
        lying = [[c for c in candidates if model.on(c.cube[2], c.cube[1]) is variant] for variant in model.variants]
        own = [
            placed(replace(variant, others=()), cluster, task, dtype, some)
            for variant, some in zip(model.variants, lying, strict=True)
        ]
        return sorted(chain(*own), key=lambda plan: plan.closed)
    unique = list({replace(each, seconds=0.0): each for each in candidates}.values())
    tried: list[tuple[int, tuple[str, ...], tuple[int, ...]]] = []
    for number, each in enumerate(unique):
        sizes = (each.workers, each.data, *each.cube)
        tried += [(number, *placement) for placement in placements(sizes, cluster.devices_per_node)]
    s = settings_of([unique[number] for number, *_ in tried], [apart for *_, apart in tried], task)
    pieces = cost(model, s, cluster, dtype)
    found: list[Plan] = []
    for alike, places in _groups([unique[number] for number, *_ in tried]):
        numbered = [(unique[tried[place][0]], tried[place][1]) for place in places]
        found += _plans(model, cluster, alike, numbered, _some(pieces, np.array(places)))
    return sorted(found, key=lambda plan: plan.closed)


def settings_of(candidates: Sequence[Candidate], apart: Sequence[Sequence[int]], task: Task) -> ParallelConfig:
    def each(value: Callable[[Candidate], Any], kind: type = float) -> Any:
        return np.array([value(candidate) for candidate in candidates], dtype=kind)

    rank_stride = np.array(apart, dtype=float)
    return ParallelConfig(
        data=each(lambda c: c.data),
        z=each(lambda c: c.cube[0]),
        y=each(lambda c: c.cube[1]),
        x=each(lambda c: c.cube[2]),
        samples=each(lambda c: c.microbatch * c.data * c.cube[0]),
        sequence=task.sequence,
        sharded=each(lambda c: c.sharded, bool),
        weights=each(lambda c: c.weights, int),
        regathered=each(lambda c: c.regathered, bool),
        ways=each(lambda c: c.ways),
        item=task.item,
        gradients=task.gradients,
        precision=task.precision,
        record=each(lambda c: task.record and not c.recompute, bool),
        rank_stride={axis: rank_stride[:, place] for place, axis in enumerate(AXES)},
    )


def _groups(candidates: Sequence[Candidate]) -> Iterable[tuple[ScheduleGroup, list[int]]]:
    def key(place: int) -> tuple[str, int, int, str]:
        c = candidates[place]
        return c.shape.title, c.workers, c.microbatches, str(c.recompute)

    for _, places in groupby(sorted(range(len(candidates)), key=key), key):
        some = list(places)
        c = candidates[some[0]]
        yield ScheduleGroup(c.shape, c.workers, c.microbatches, c.recompute), some


def _plans(
    model: Model,
    cluster: Cluster,
    alike: ScheduleGroup,
    tried: Sequence[tuple[Candidate, tuple[str, ...]]],
    some: Pieces,
) -> list[Plan]:
    """The closed form of candidates that have a schedule in common, each in the fastest of its placements."""
    chosen = with_stages(model, alike.workers * alike.shape.chunks)
    held = loads(chosen, alike.shape, alike.workers)
    carried = carry(held, some)
    count = float(alike.microbatches)
    timed = step(alike.shape, alike.workers, count, carried, some.settings, cluster, alike.recompute)
    rooms = [
        memory(alike.shape, alike.workers, load.first, count, c, some.settings.item, alike.recompute, cluster.software)
        for load, c in zip(held, carried, strict=True)
    ]
    totals = np.stack([np.broadcast_to(room.total, len(tried)) for room in rooms])
    worst, each = np.argmax(totals, axis=0), timed.seconds.tolist()
    best: dict[int, int] = {}
    for spot, (c, _) in enumerate(tried):
        if id(c) not in best or each[spot] < each[best[id(c)]]:
            best[id(c)] = spot
    found = []
    for spot in best.values():
        c, placement = tried[spot]
        kept = rooms[int(worst[spot])]._asdict()
        z, y, x = c.cube
        found.append(
            Plan(
                grid=Grid(pipe=c.workers, data=c.data, z=z, y=y, x=x, placement=placement),
                shape=c.shape,
                microbatches=c.microbatches,
                microbatch=c.microbatch,
                sharded=c.sharded,
                weights=c.weights,
                regathered=c.regathered,
                ways=c.ways,
                recompute=c.recompute,
                seconds=each[spot],
                error=uncertainty(cluster, float(timed.exposed[spot]) / each[spot]),
                computed=float(timed.computed[spot]),
                bubble=float(timed.bubble[spot]),
                exposed=float(timed.exposed[spot]),
                memory={name: float(value[spot] if np.ndim(value) else value) for name, value in kept.items()},
                closed=each[spot],
            )
        )
    return found


def _some(pieces: Pieces, places: Any) -> Pieces:
    return taken(pieces, (places,), pieces.settings.z.shape, at(pieces.settings, places))


def _simulate(
    model: Model, cluster: Cluster, pieces: Pieces, alike: ScheduleGroup, places: list[int], plans: list[Plan]
) -> None:
    """Give the plans at these places the simulator's time."""
    some = _some(pieces, np.array(places))
    chosen = with_stages(model, alike.workers * alike.shape.chunks)
    found = simulated_step(chosen, cluster, some, alike)
    for spot, place in enumerate(places):
        plans[place] = plans[place].timed(float(found.seconds[spot]), float(found.waited[spot]))


Numbers = tuple[float, ...]


def stage_costs(
    model: Model, cluster: Cluster, task: Task, dtype: Dtype, plan: Plan
) -> tuple[Numbers, Numbers, Numbers, float]:
    """Seconds of forward, input gradient and weight gradient on each stage of a plan, and of a message."""
    times = plan_times(model, cluster, task, dtype, plan)
    weight_grad = times.weight_grad[:, 0]
    # Without split backwards the two are one, and shorter than both.
    input_grad = times.input_grad[:, 0] if plan.shape.split else times.backward[:, 0] - weight_grad
    message = float(np.broadcast_to(times.message, 1)[0])
    return tuple(times.forward[:, 0]), tuple(input_grad), tuple(weight_grad), message


def plan_times(model: Model, cluster: Cluster, task: Task, dtype: Dtype, plan: Plan) -> StageTimes:
    """Of one plan, [stages, 1]."""
    chosen, alike, pieces = _alone(model, cluster, task, dtype, plan)
    return stage_times(chosen, alike, pieces, cluster)


def plan_seconds(model: Model, cluster: Cluster, task: Task, dtype: Dtype, plan: Plan) -> float:
    """The simulated step of one plan on a cluster, which need not be the one that it was found for."""
    chosen, alike, pieces = _alone(model, cluster, task, dtype, plan)
    return float(simulated_step(chosen, cluster, pieces, alike).seconds[0])


def _alone(model: Model, cluster: Cluster, task: Task, dtype: Dtype, plan: Plan) -> tuple[Model, ScheduleGroup, Pieces]:
    model = model.on(plan.grid.x, plan.grid.y)
    alike = ScheduleGroup(plan.shape, plan.grid.pipe, plan.microbatches, plan.recompute)
    apart = [int(plan.rank_stride[axis]) for axis in AXES]
    pieces = cost(model, settings_of([as_candidate(plan)], [apart], task), cluster, dtype)
    return with_stages(model, alike.workers * alike.shape.chunks), alike, pieces


def as_candidate(plan: Plan) -> Candidate:
    g = plan.grid
    return Candidate(
        seconds=0.0,
        shape=plan.shape,
        workers=g.pipe,
        data=g.data,
        microbatches=plan.microbatches,
        recompute=plan.recompute,
        cube=(g.z, g.y, g.x),
        microbatch=plan.microbatch,
        sharded=plan.sharded,
        weights=plan.weights,
        regathered=plan.regathered,
        ways=plan.ways,
    )
