"""A lower bound on the time of any order, for a given placement of stages, costs and memory cap."""

from __future__ import annotations

from collections.abc import Iterator

from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.listing import Layout


def lower_bound(layout: Layout, costs: Costs, cap: float | None = None) -> float:
    """The larger of what one micro-batch needs alone and what a worker needs for its work, with a split backward."""
    return max([*_alone(layout, costs), *(_worker(layout, costs, cap, w) for w in range(layout.workers))])


def _alone(layout: Layout, costs: Costs) -> Iterator[float]:
    """One micro-batch's forward, backward and last weight gradient."""
    last = layout.stages - 1
    for line, microbatches in zip(layout.lines, layout.microbatches, strict=True):
        if microbatches:
            there = _reach(line, costs, last) + costs.forward[last]
            yield there + _backward(costs, last) + _return(line, costs, last)


def _worker(layout: Layout, costs: Costs, cap: float | None, worker: int) -> float:
    """A worker's work, plus the idle time before its first action and after its last input gradient."""
    homes = [
        (line, stage, len(microbatches))
        for line, microbatches in zip(layout.lines, layout.microbatches, strict=True)
        for stage, home in enumerate(line)
        if home == worker and microbatches
    ]
    if not homes:
        return 0.0
    head = min(_reach(line, costs, stage) for line, stage, _ in homes)
    critical = sum(count * (costs.forward[s] + _backward(costs, s)) for _, s, count in homes)
    all_work = critical + sum(count * costs.weight_grad[s] for _, s, count in homes)
    tail = min(_return(line, costs, stage) for line, stage, _ in homes)
    bounds = [head + all_work, head + critical + tail]
    if cap and not costs.recompute:
        # Every micro-batch holds its memory at least as long as it takes from here to the last stage and back.
        held = sum(count * costs.activation[s] * _hold(line, costs, s) for line, s, count in homes)
        bounds.append(head + held / cap)
    return max(bounds)


def _backward(costs: Costs, stage: int) -> float:
    return costs.input_grad[stage] + (costs.forward[stage] if stage in costs.recompute else 0.0)


def _hops(line: tuple[int, ...], costs: Costs, first: int, last: int) -> float:
    return costs.message * sum(line[s] != line[s + 1] for s in range(first, last))


def _reach(line: tuple[int, ...], costs: Costs, stage: int) -> float:
    """The earliest start of a forward on the stage."""
    return sum(costs.forward[:stage]) + _hops(line, costs, 0, stage)


def _return(line: tuple[int, ...], costs: Costs, stage: int) -> float:
    """The time from the end of the stage's input gradient to the end of the last weight gradient that follows from it."""
    return sum(_backward(costs, s) for s in range(stage)) + _hops(line, costs, 0, stage) + costs.weight_grad[0]


def _hold(line: tuple[int, ...], costs: Costs, stage: int) -> float:
    last = len(line) - 1
    there_and_back = sum(costs.forward[s] + costs.input_grad[s] for s in range(stage, last + 1))
    return there_and_back + 2 * _hops(line, costs, stage, last) + costs.weight_grad[stage]
