"""Strategies that differ: of the best plans one of each kind, and beside them those that everybody uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cubeloom.base.grid import Grid
from cubeloom.parallel.config import FREED
from cubeloom.plan.search.answer import Answer, candidates
from cubeloom.plan.search.found import Plan
from cubeloom.plan.search.refine import refined

_PIPES = tuple(1 << power for power in range(8))
_MEGATRON = ("1f1b", "interleaved")
_SIMULATED = 4  # candidates of a strategy, of which the fastest stands for it


@dataclass(frozen=True)
class Strategy:
    """What many would take, by its name in the field; without a plan where it cannot run, and then why."""

    name: str
    plan: Plan | None
    refused: str = ""


def different(answer: Answer, most: int = 4) -> list[Plan]:
    """The best plans of which no two cut the same axes under the same schedule."""
    found: dict[tuple[object, ...], Plan] = {}
    for plan in answer.plans:
        cut = tuple(axis for axis, size in plan.grid.sizes.items() if size > 1)
        found.setdefault((cut, plan.shape.name), plan)
    return sorted(found.values(), key=lambda plan: plan.seconds)[:most]


def usual(answer: Answer) -> list[Strategy]:
    """FSDP, HSDP, Megatron-LM's with and without sequence parallelism, and a plain 1F1B with data parallelism."""
    return [usual_one(answer, name) for name in usual_names(answer)]


def usual_names(answer: Answer) -> list[str]:
    """Those that there are on so many devices."""
    return list(_usual(answer))


def usual_one(answer: Answer, name: str) -> Strategy:
    """One of them: each takes a search of its own."""
    return _best(answer, name, *_usual(answer)[name])


def _usual(answer: Answer) -> dict[str, tuple[list[Grid], Callable[[Plan], bool]]]:
    """The grids of each, and which of their plans are meant."""
    if answer.model.planes is not None:  # of a model whose cut is found, other planes may be unknown
        return {}
    devices = answer.task.devices
    node = min(answer.cluster.devices_per_node, devices)
    pipelines = _pipelines(devices, node)
    found: dict[str, tuple[list[Grid], Callable[[Plan], bool]]] = {
        "FSDP": ([Grid(z=devices)], lambda plan: plan.weights == FREED),
        "HSDP": (list(_rest_is_data(devices, z=node)) if 1 < node < devices else [], _any),
        "Megatron-LM, sequence parallel": (pipelines, lambda p: p.sharded and p.shape.name in _MEGATRON),
        "Megatron-LM": (pipelines, lambda p: not p.sharded and p.shape.name in _MEGATRON),
        "1F1B and data parallel": (_pipelines(devices, 1)[1:], lambda plan: plan.shape.name == "1f1b"),
    }
    return {name: (grids, fits) for name, (grids, fits) in found.items() if grids}


def _any(_: Plan) -> bool:
    return True


def _rest_is_data(devices: int, **sizes: int) -> Iterator[Grid]:
    rest = devices // math.prod(sizes.values())
    if rest * math.prod(sizes.values()) == devices:
        yield Grid.parse(",".join(f"{axis}={size}" for axis, size in {**sizes, "data": rest}.items()))


def _pipelines(devices: int, across: int) -> list[Grid]:
    """Tensor parallelism over a node, pipelines of any depth, data parallelism over the rest."""
    if across == 1 and devices == 1:
        return []
    return [grid for pipe in _PIPES for grid in _rest_is_data(devices, pipe=pipe, y=across)]


def _best(answer: Answer, name: str, grids: list[Grid], fits: Callable[[Plan], bool]) -> Strategy:
    some: list[Plan] = []
    reasons: dict[str, int] = {}
    for grid in grids:
        found, tally = candidates(answer.model, answer.cluster, answer.task, answer.dtype, grid)
        some += [plan for plan in found if fits(plan)]
        for reason, count in tally.refused.items():
            reasons[reason] = reasons.get(reason, 0) + count
    some = sorted(some, key=lambda plan: plan.closed)[:_SIMULATED]
    if some:
        return Strategy(name, refined(answer.model, answer.cluster, answer.task, answer.dtype, some, len(some))[0])
    said = {reason: count for reason, count in reasons.items() if count and not reason.startswith("schedule")}
    return Strategy(name, None, max(said, key=lambda reason: said[reason], default="no such plan"))
