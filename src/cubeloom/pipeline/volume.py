"""The bytes that a rank of a pipeline receives in one step, from the schedule and the layouts of its stages' layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.layout import Layout
from cubeloom.parallel.specs import LayerSpec, Side, fp8_layers, stream
from cubeloom.parallel.volume import (
    Received,
    amax_volume,
    copies_volume,
    gradient_volume,
    pass_volume,
    repeated_volume,
    sum_volume,
)
from cubeloom.pipeline import Schedule
from cubeloom.pipeline.workload import Workload, holders

_DOUBLE = 8  # losses and counts are summed in float64
Layers = Sequence[tuple[LayerSpec, int]]  # each with the number of such layers in the stage
# The layers of a block, the number of such blocks, and the layers whose results its recomputation keeps.
Block = tuple[Sequence[LayerSpec], int, frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class StageOutput:
    """A tensor that a piece sends to the next: its elements per token (or sample), and the side of its features; None:
    whole.
    """

    numbers: int
    side: Side | None
    always: bool  # rows are cut even if activations are replicated

    def layout(self, sharded: bool) -> Layout:
        if self.side is None:
            return Layout.of(rows=("data", "z"), features=None)
        return stream(self.side, sharded or self.always)

    def elements(self, tokens: bool, c: ParallelConfig) -> Any:
        """Elements on one rank."""
        whole = c.samples * (c.sequence if tokens else 1) * self.numbers
        cut, replicated = (whole / c.size(*self.layout(sharded).cutting) for sharded in (True, False))
        return c.sharded * cut + (1 - c.sharded) * replicated


@dataclass(frozen=True)
class RankOutput:
    """A tensor that a piece of a traced model sends to the next.

    `numbers`: its elements on a rank, per sample; or for any number of samples, if it does not depend on them.
    """

    numbers: int
    of_samples: bool

    def elements(self, tokens: bool, c: ParallelConfig) -> Any:
        return self.numbers * c.samples / (c.data * c.z) if self.of_samples else self.numbers


def pipeline_volume(
    stages: Sequence[Layers],
    received: Sequence[Any],
    tied: Collection[str],
    c: ParallelConfig,
    schedule: Schedule,
    worker: int,
    zero: bool = False,
    losses: int = 1,
    averaged: bool = False,
    again: Sequence[Sequence[Block]] = (),
) -> Iterator[Received]:
    """One step of a worker's ranks. `c.samples` are those of one portion, a micro-batch or half of one.

    `received`: bytes of each stage's output on one rank. `tied`: weights that two layers share. `losses`: how many the
    last stage computes; `averaged`: their sum is also averaged over samples. `again`: the recomputed blocks of each
    stage; empty: none.
    """
    work = Workload.of(schedule, worker)
    for held in work.held:
        for layer, count in stages[held.stage]:
            for axes, nbytes in pass_volume(layer, c, held.gathers * c.size() / held.passes):
                yield axes, count * held.passes * nbytes
        for block, count, kept in again[held.stage] if again else ():
            for axes, nbytes in repeated_volume(block, c, kept):
                yield axes, count * held.passes * nbytes
    own = {held.stage for held in work.held}
    updates = 1 + schedule.groups[-1]
    for axes, nbytes in _reductions(stages, own, tied, c, schedule, zero):
        yield axes, updates * nbytes
    if schedule.stages - 1 in own:
        yield sum_volume(losses * work.portions + averaged, ("data", "z"), _DOUBLE, c)
    rounded = (count * len(fp8_layers([layer])) for layers in stages for layer, count in layers)
    yield from amax_volume(sum(rounded), c, len(schedule.workers))
    yield sum_volume(1, ("pipe",), _DOUBLE, c, len(schedule.workers))
    for stage, times in work.receives:
        yield ("pipe",), times * received[stage]


def _reductions(
    stages: Sequence[Layers], own: set[int], tied: Collection[str], c: ParallelConfig, schedule: Schedule, zero: bool
) -> Iterator[Received]:
    """Each gradient, over its replicas and the workers of its stage; a shared weight's, over those of all its stages."""
    shared: dict[tuple[str, Any], Received] = {}
    for stage in own:
        for layer, count in stages[stage]:
            for each in layer.parameters(c):
                if each.name not in tied:
                    axes, nbytes = gradient_volume(each, c, len(holders(schedule, stage)), zero)
                    yield axes, count * nbytes
                    if np.all(each.when):
                        axes, nbytes = copies_volume(each, c, holders(schedule, stage), zero)
                        yield axes, count * nbytes
                else:
                    using = [number for number, layers in enumerate(stages) if _uses(each.name, layers, c)]
                    shared[each.name, each.partial] = gradient_volume(each, c, len(holders(schedule, *using)), zero)
    yield from shared.values()


def _uses(name: str, layers: Layers, c: ParallelConfig) -> bool:
    return any(each.name == name for layer, _ in layers for each in layer.parameters(c))
