"""The view Schedules: one or two schedules, simulated with costs of the user's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.limits import within
from cubeloom.pipeline import Costs, Sync, Timeline, check, family, generate, names, simulate, synchronised
from cubeloom.pipeline.drawing.view import view
from cubeloom.pipeline.schedules import FAMILIES
from cubeloom.tools.explore.query import Query

_MOST = 4000  # forwards of a schedule that a page draws
_OPTIONS = ("pairs", "chunks")
_SYNC = ("none", *(str(each) for each in Sync))


def choices() -> dict[str, Any]:
    return {
        "families": [
            {"name": name, "about": each.summary, "options": sorted(each.options)} for name, each in FAMILIES.items()
        ],
        "sync": _SYNC,
    }


def drawn(asked: Query) -> dict[str, Any]:
    """The timelines of `name` and, where it is given, `compare`, on the same stages and costs."""
    given = [asked.choice("name", ("1f1b", *names()))]
    if asked.get("compare", "none") != "none":
        given.append(asked["compare"])
    return {"timelines": [view(_timeline(name, asked)) for name in given]}


def _timeline(name: str, asked: Query) -> Timeline:
    stages, microbatches = asked.whole("stages", 8), asked.whole("microbatches", 8)
    options = family(name).options
    more: dict[str, Any] = {
        option: asked.whole(option, 0) for option in _OPTIONS if option in options and option in asked
    }
    within("stages", stages)
    within("micro-batches", microbatches)
    if stages * microbatches * more.get("chunks", 1) > _MOST:
        raise UserError(
            f"{stages} stages and {microbatches} micro-batches are {stages * microbatches:,} forwards: a page draws at "
            f"most {_MOST:,}; `cubeloom schedule {name}` computes larger ones"
        )
    each = {cost: asked.real(cost, default) for cost, default in (("F", 1.0), ("I", 1.0), ("W", 1.0), ("p2p", 0.0))}
    for cost, value in (*each.items(), ("reduce", asked.real("reduce", 0.0))):
        within(cost, value, least=0)
    whole = Costs.uniform(stages, each["F"], each["I"], each["W"], each["p2p"])
    schedule = check(generate(name, stages, microbatches, costs=whole if "costs" in options else None, **more))
    sync = asked.choice("sync", _SYNC)
    if sync != "none" and family(name).synchronous:
        schedule = synchronised(schedule, Sync(sync))
    costs = Costs.like(schedule, each["F"], each["I"], each["W"], each["p2p"])
    again = frozenset(range(schedule.stages) if "recompute" in asked else ())
    reduce = (asked.real("reduce", 0.0) * schedule.chunk,) * schedule.stages
    return simulate(schedule, replace(costs, reduce=reduce, recompute=again))
