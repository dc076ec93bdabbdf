"""A time that no order can beat, for given places of the stages, costs and memory cap."""

from __future__ import annotations

from collections.abc import Iterator

from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.listing import Layout


def lower_bound(layout: Layout, costs: Costs, cap: float | None = None) -> float:
    """What one micro-batch needs alone or a worker needs for all of its own, with the backward free to be split."""
    return max([*_alone(layout, costs), *(_worker(layout, costs, cap, w) for w in range(layout.workers))])


def _alone(layout: Layout, costs: Costs) -> Iterator[float]:
    """A micro-batch's way forward, back, and its last weight gradient."""
    last = layout.stages - 1
    for line, microbatches in zip(layout.lines, layout.microbatches, strict=True):
        if microbatches:
            there = _reach(line, costs, last) + costs.forward[last]
            yield there + _backward(costs, last) + _return(line, costs, last)


def _worker(layout: Layout, costs: Costs, cap: float | None, worker: int) -> float:
    """Before its first action and after its last input gradient it can do nothing about time."""
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
        # Every micro-batch holds its room at least as long as it takes from here to the last stage and back.
        held = sum(count * costs.activation[s] * _hold(line, costs, s) for line, s, count in homes)
        bounds.append(head + held / cap)
    return max(bounds)


def _backward(costs: Costs, stage: int) -> float:
    return costs.input_grad[stage] + (costs.forward[stage] if stage in costs.recompute else 0.0)


def _hops(line: tuple[int, ...], costs: Costs, first: int, last: int) -> float:
    return costs.message * sum(line[s] != line[s + 1] for s in range(first, last))


def _reach(line: tuple[int, ...], costs: Costs, stage: int) -> float:
    """The earliest a forward can start on the stage."""
    return sum(costs.forward[:stage]) + _hops(line, costs, 0, stage)


def _return(line: tuple[int, ...], costs: Costs, stage: int) -> float:
    """From the end of the stage's input gradient to the end of the last weight gradient it leads to."""
    return sum(_backward(costs, s) for s in range(stage)) + _hops(line, costs, 0, stage) + costs.weight_grad[0]


def _hold(line: tuple[int, ...], costs: Costs, stage: int) -> float:
    last = len(line) - 1
    there_and_back = sum(costs.forward[s] + costs.input_grad[s] for s in range(stage, last + 1))
    return there_and_back + 2 * _hops(line, costs, stage, last) + costs.weight_grad[stage]
