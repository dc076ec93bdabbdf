"""Search for an order under given costs and memory cap. It is never slower than a named schedule under the same cap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from cubeloom.base.errors import UserError
from cubeloom.pipeline.bounds import lower_bound
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.listing import Layout
from cubeloom.pipeline.memory import in_flight
from cubeloom.pipeline.polish import polish
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.schedules._common import at_least_one, zigzag
from cubeloom.pipeline.schedules.chimera import Mode, chimera
from cubeloom.pipeline.schedules.chimera_zb import bidirectional, chimera_zb
from cubeloom.pipeline.schedules.dualpipe import dualpipe, dualpipev
from cubeloom.pipeline.schedules.gems import gems
from cubeloom.pipeline.schedules.gpipe import gpipe
from cubeloom.pipeline.schedules.hanayo import hanayo
from cubeloom.pipeline.schedules.interleaved import interleaved
from cubeloom.pipeline.schedules.one_f_one_b import one_f_one_b
from cubeloom.pipeline.schedules.zbv import zbv
from cubeloom.pipeline.schedules.zero_bubble import zb_h1, zb_h2
from cubeloom.pipeline.search import search
from cubeloom.pipeline.simulator import simulate


class Placement(StrEnum):
    LINEAR = "linear"  # stage s on worker s
    LOOPED = "looped"  # two chunks per worker, both downwards, as in interleaved 1F1B
    V = "v"  # two chunks per worker, down and up again
    BIDIRECTIONAL = "bidirectional"  # Chimera's: replicas in opposite directions, so two or more copies of the weights
    ANY = "any"


@dataclass(frozen=True)
class Plan:
    """The order that `auto` found, and what it was compared with."""

    schedule: Schedule
    costs: Costs  # of the schedule's stages
    makespan: float
    bound: float  # no order with an allowed placement and this cap takes less, with the same halving of micro-batches
    cap: float
    rivals: tuple[tuple[str, float], ...]  # named schedules under the cap, with their makespans

    @property
    def gap(self) -> float:
        """The relative distance from the lower bound: 0 is proved optimal."""
        return self.makespan / self.bound - 1 if self.bound else 0.0


def auto(
    stages: int,
    microbatches: int,
    costs: Costs | None = None,
    cap: float | None = None,
    placement: Placement = Placement.ANY,
    pairs: int = 1,
    tries: int = 1000,
) -> Plan:
    """`costs` are those of `stages` equal shares. If a worker holds two chunks, each share is cut in two.

    The cap is in units of `costs.activation`; by default it is that of D micro-batches of the largest share.
    """
    at_least_one("auto", stages, microbatches)
    costs = costs or Costs.uniform(stages)
    if len(costs.forward) != stages:
        raise UserError(f"auto has {stages} stages but costs for {len(costs.forward)}")
    cap = stages * max(costs.activation) if cap is None else cap
    sites = list(_sites(stages, microbatches, costs, placement, pairs, tries))
    named = [plan for site in sites for plan in site.plans(cap)]
    rivals = tuple(sorted({(plan.schedule.name, plan.makespan) for plan in named}, key=lambda item: item[::-1]))
    bound = min(site.bound(cap) for site in sites)
    best = _best(sites, named, cap, bound, tries)
    if best is None:
        needed = min(site.smallest_cap for site in sites)
        raise UserError(
            f"no schedule of {stages} stages keeps to a cap of {cap:g} activations; the least is {needed:g}"
        )
    if best.schedule.halved:
        bound = min(site.bound(cap, parts=2) for site in sites)
    return replace(best, schedule=replace(best.schedule, name="auto"), bound=bound, rivals=rivals)


def _best(sites: list[_Site], named: list[Plan], cap: float, bound: float, tries: int) -> Plan | None:
    """The best named schedule if it is optimal; otherwise the best of these and the orders found by search, polished."""
    plans = sorted(named, key=lambda plan: plan.makespan)
    if plans and plans[0].makespan <= bound + 1e-9:
        return plans[0]
    for site in sites:
        if site.smallest_cap <= cap + 1e-9:
            found = search("auto", site.layout, site.costs, cap, tries, effort=40_000)
            plans.append(Plan(found.schedule, site.costs, found.makespan, bound, cap, ()))
    plans.sort(key=lambda plan: plan.makespan)
    if plans and plans[0].makespan > bound + 1e-9:
        plans = [_polished(plan, bound, tries) for plan in plans[:3]]
    return min(plans, key=lambda plan: plan.makespan, default=None)


def _polished(plan: Plan, bound: float, tries: int) -> Plan:
    schedule = polish(plan.schedule, plan.costs, plan.cap, bound, tries)
    return replace(plan, schedule=schedule, makespan=simulate(schedule, plan.costs).makespan)


@dataclass(frozen=True)
class _Site:
    """One placement of the stages, and the named schedules with this placement."""

    layout: Layout
    costs: Costs
    named: tuple[Callable[[], Schedule], ...]

    def bound(self, cap: float, parts: int = 1) -> float:
        """The lower bound. Micro-batches in parts are more and smaller ones."""
        counts = tuple(range(parts * len(microbatches)) for microbatches in self.layout.microbatches)
        return lower_bound(replace(self.layout, microbatches=counts), self.costs.part(1 / parts), cap)

    @property
    def smallest_cap(self) -> float:
        """Each stage of a worker must have memory for one micro-batch."""
        room = [0.0] * self.layout.workers
        for line in self.layout.lines:
            for stage, worker in enumerate(line):
                room[worker] += self.costs.activation[stage]
        return max(room)

    def plans(self, cap: float) -> Iterator[Plan]:
        for make in self.named:
            try:
                schedule = make()
            except UserError:
                continue  # not possible for this number of stages or micro-batches
            if all(in_flight(row, self.costs.activation) <= cap + 1e-9 for row in schedule.workers):
                yield Plan(schedule, self.costs, simulate(schedule, self.costs).makespan, 0.0, cap, ())


def _sites(
    stages: int, microbatches: int, costs: Costs, placement: Placement, pairs: int, tries: int
) -> Iterator[_Site]:
    def made_by(*families: Callable[[int, int], Schedule]) -> tuple[Callable[[], Schedule], ...]:
        return tuple(lambda family=family: family(stages, microbatches) for family in families)

    wanted = set(Placement) if placement == Placement.ANY else {placement}
    halves = costs.cut(2)
    if Placement.LINEAR in wanted:
        layout = Layout.single(range(stages), microbatches)
        yield _Site(layout, costs, made_by(gpipe, one_f_one_b, zb_h1, zb_h2))
    if Placement.LOOPED in wanted:
        layout = Layout.single([*range(stages), *range(stages)], microbatches)
        yield _Site(layout, halves, made_by(interleaved))
    if Placement.V in wanted:
        layout = Layout.single(zigzag(stages, 2), microbatches)
        yield _Site(layout, halves, made_by(zbv, dualpipev, hanayo))
    if placement == Placement.BIDIRECTIONAL or (Placement.BIDIRECTIONAL in wanted and stages % 2 == 0):
        layout = bidirectional("auto", stages, microbatches, pairs)
        own = [lambda mode=mode: chimera(stages, microbatches, pairs, mode) for mode in Mode]
        # One made for these costs, and the default one.
        split = [lambda made=made: chimera_zb(stages, microbatches, pairs, made, tries) for made in (costs, None)]
        peers = made_by(gems, dualpipe) if pairs == 1 else ()
        yield _Site(layout, costs, (*own, *split, *peers))
