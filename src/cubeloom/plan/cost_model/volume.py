"""Bytes that a rank receives in a step, by axis, as the ledger counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.layout import Axes
from cubeloom.parallel.specs import LayerSpec, fp8_layers
from cubeloom.parallel.volume import add, amax_volume, gradient_volume, pass_volume
from cubeloom.pipeline import Schedule
from cubeloom.pipeline.volume import Block, StageOutput, pipeline_volume
from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.model import Model
from cubeloom.plan.model.model import PlaneOutput

Bytes = dict[Axes, Any]


def step_bytes(model: Model, c: ParallelConfig) -> Bytes:
    """One forward and backward without a pipeline, with the reduction of gradients."""
    layers = _layers(model, [model.row.count(kind) for kind in range(len(model.kinds))])
    passed = ((axes, count * nbytes) for layer, count in layers for axes, nbytes in pass_volume(layer, c))
    summed, tied = [], {}
    for layer, count in layers:
        for each in layer.parameters(c):
            axes, nbytes = gradient_volume(each, c, zero=True)
            if each.name in model.tied:
                tied[each.name, axes] = axes, nbytes
            else:
                summed.append((axes, count * nbytes))
    rounded = sum(count * len(fp8_layers([layer])) for layer, count in layers)
    return add([*passed, *summed, *tied.values(), *amax_volume(rounded, c)])


def pipeline_bytes(
    model: Model, c: ParallelConfig, schedule: Schedule, worker: int, recompute: Recompute = False
) -> Bytes:
    """One step of a worker's ranks. `c.samples` are those of one portion. Attention, where recomputed, moves nothing."""
    counts = model.stages(schedule.stages)
    again = [_blocks(model, each) for each in counts] if recompute is True else []
    stages = [_layers(model, each) for each in counts]
    outputs = [model.kinds[model.row[end - 1]].outputs for end in model.cuts[schedule.stages]]
    received = [output_numbers(each, model, c) * c.item for each in outputs]
    losses = model.kinds[model.row[-1]].losses
    averaged = model.planes is not None  # the loss of a traced model, as its runtime averages it
    return add(pipeline_volume(stages, received, model.tied, c, schedule, worker, True, losses, averaged, again))


def output_numbers(outputs: Sequence[StageOutput | PlaneOutput], model: Model, c: ParallelConfig) -> Any:
    """Elements that a stage sends to the next, on one rank."""
    return sum(each.elements(model.tokens, c) for each in outputs)


def _blocks(model: Model, counts: Sequence[int]) -> list[Block]:
    """Those of so many pieces of each kind."""
    some = zip(model.kinds, counts, strict=True)
    return [(kind.layers, count, frozenset[str]()) for kind, count in some if kind.block and count]


def _layers(model: Model, counts: Sequence[int]) -> list[tuple[LayerSpec, int]]:
    """Of so many pieces of each kind."""
    return [(layer, count) for kind, count in zip(model.kinds, counts, strict=True) if count for layer in kind.layers]
