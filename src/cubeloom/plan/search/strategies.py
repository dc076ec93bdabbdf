"""Strategies that differ: of the best plans one of each kind, and beside them those that everybody uses."""

from __future__ import annotations

from dataclasses import dataclass

from cubeloom.parallel.config import FREED
from cubeloom.plan.search.answer import Answer, candidates
from cubeloom.plan.search.found import Plan
from cubeloom.plan.search.refine import refined
from cubeloom.plan.search.space import Part

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
    found, tally = candidates(
        answer.model, answer.cluster, answer.task, answer.dtype, _usual(answer)[name], keep=_SIMULATED * 8
    )
    if found:
        some = found[:_SIMULATED]
        return Strategy(name, refined(answer.model, answer.cluster, answer.task, answer.dtype, some, len(some))[0])
    said = {reason: count for reason, count in tally.refused.items() if count and not reason.startswith("schedule")}
    return Strategy(name, None, max(said, key=lambda reason: said[reason], default="no such plan"))


def _usual(answer: Answer) -> dict[str, Part]:
    """The decompositions that are meant."""
    if answer.model.planes is not None:  # of a model whose cut is found, other planes may be unknown
        return {}
    devices = answer.task.devices
    node = min(answer.cluster.devices_per_node, devices)
    # Tensor parallelism over a node, pipelines of any depth, data parallelism over the rest.
    across, plain = (_depths(devices, size) for size in (node, 1))
    found = {
        "FSDP": Part((devices, 1, 1), (1,), weights=FREED),
        "HSDP": Part((node, 1, 1), (1,) if 1 < node < devices and devices % node == 0 else (), weights=FREED),
        "Megatron-LM, sequence parallel": Part((1, node, 1), across, _MEGATRON, sharded=True),
        "Megatron-LM": Part((1, node, 1), across, _MEGATRON, sharded=False),
        "1F1B and data parallel": Part((1, 1, 1), plain[1:], ("1f1b",)),
    }
    return {name: part for name, part in found.items() if part.pipes}


def _depths(devices: int, across: int) -> tuple[int, ...]:
    """Of pipelines, with so many ranks in each stage."""
    return tuple(pipe for pipe in _PIPES if devices > 1 and devices % (pipe * across) == 0)
