"""Bytes that a rank receives in a step, by axis: those that the ledger counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cubeloom.pipeline import Schedule
from cubeloom.plan.closed.layer import moves, parameters
from cubeloom.plan.closed.moves import Axes, Bytes, Parameter, add, received, ring
from cubeloom.plan.closed.part import Part, holders
from cubeloom.plan.closed.settings import Recompute, Settings, choose
from cubeloom.plan.costs import Quantity
from cubeloom.plan.model.layers import Handed, Model, other

_DOUBLE = 8  # losses and counts are summed in float64


def step_bytes(model: Model, s: Settings) -> Bytes:
    """One forward and backward without a pipeline, with the sum of gradients."""
    counts = [model.row.count(kind) for kind in range(len(model.kinds))]
    return add([*_passes(model, s, counts, passes=1, gathers=1), *_sums(model, s, counts)])


def pipeline_bytes(model: Model, s: Settings, schedule: Schedule, worker: int, recompute: Recompute = False) -> Bytes:
    """One step of a worker's ranks. `s.samples` are those of one portion.

    A recomputation runs forwards again; how far is torch's to decide, so that its bytes are an upper bound. Attention has none.
    """
    part = Part.of(schedule, worker)
    stages = model.stages(schedule.stages)
    found: list[tuple[Axes, Any]] = []
    for held in part.held:
        found += _passes(model, s, stages[held.stage], held.passes, held.gathers)
        if recompute is True:
            found += _passes(model, s, stages[held.stage], held.passes, 0, ("F",))
    for stage in {held.stage for held in part.held}:
        found += _sums(model, s, stages[stage], holders(schedule, stage), tied=False)
    found += _tied(model, s, schedule, [stages[held.stage] for held in part.held])
    if any(held.stage == schedule.stages - 1 for held in part.held):
        counts = model.kinds[model.row[-1]].losses * part.portions * _DOUBLE
        found.append((("data", "z"), 2 * ring(s.size("data", "z")) * counts))
    workers = exact(len(schedule.workers), s)
    found.append((("pipe",), 2 * ring(workers) * _DOUBLE))
    for stage, times in part.receives:
        last = model.row[model.cuts[schedule.stages][stage] - 1]
        found.append((("pipe",), times * handed_numbers(model.kinds[last].handed, model, s) * s.item))
    return add(found)


def named(volume: Bytes, s: Settings) -> dict[str, Any]:
    """Of one decomposition: the bytes along each axis, or along several as one group, as the ledger names it."""
    found: dict[str, Any] = {}
    for axes, size in volume.items():
        label = "+".join(axis for axis in axes if axis == "pipe" or s.size(axis) > 1)
        if size:
            found[label] = found.get(label, 0) + size
    return found


def handed_numbers(handed: Sequence[Handed], model: Model, s: Settings) -> Quantity:
    """What a stage hands to the next, on one rank."""
    rows = s.rows() if model.tokens else s.samples_of
    return sum(
        rows * each.numbers / (1 if each.side is None else s.size(each.side) * s.further(other(each.side), each.always))
        for each in handed
    )


def exact(number: int, s: Settings) -> Any:
    """The number as the settings' arithmetic has it: a fraction where they are fractions."""
    return number * (s.x / s.x)


def _passes(
    model: Model,
    s: Settings,
    counts: Sequence[int],
    passes: int,
    gathers: int,
    phases: tuple[str, ...] = ("F", "I", "W"),
) -> Iterator[tuple[Axes, Any]]:
    """Of so many pieces of each kind."""
    for kind, count in zip(model.kinds, counts, strict=True):
        for move in (move for layer in kind.layers for move in moves(layer, s) if count and move.phase in phases):
            yield move.axes, count * (gathers if move.gathered_to_keep else passes) * received(move, s)


def _sums(
    model: Model, s: Settings, counts: Sequence[int], workers: int = 1, tied: bool = True
) -> Iterator[tuple[Axes, Any]]:
    """The all-reduce of each gradient over replicas, and over the workers that hold the stage; of a shared weight once."""
    shared: dict[tuple[str, Axes], tuple[Axes, Any]] = {}
    for kind, count in zip(model.kinds, counts, strict=True):
        for each in (each for layer in kind.layers for each in parameters(layer, s) if count):
            axes = ("pipe", *each.axes) if workers > 1 else each.axes
            moved = _reduced(each, s, workers)
            if each.name not in model.tied:
                yield axes, count * moved
            elif tied:
                shared[each.name, axes] = axes, moved
    yield from shared.values()


def _tied(model: Model, s: Settings, schedule: Schedule, held: Sequence[Sequence[int]]) -> Iterator[tuple[Axes, Any]]:
    """A weight that two stages use is summed over all workers that hold one of them."""
    for name in model.tied:
        users = [kind for kind, piece in enumerate(model.kinds) if name in piece.weights]
        if not any(counts[kind] for counts in held for kind in users):
            continue
        stages = model.stages(schedule.stages)
        using = [stage for stage, counts in enumerate(stages) if any(counts[kind] for kind in users)]
        workers = holders(schedule, *using)
        owner = next(layer for piece in model.kinds for layer in piece.layers if f"{layer.name}.weight" == name)
        for each in parameters(owner, s):
            axes = ("pipe", *each.axes) if workers > 1 else each.axes
            yield axes, _reduced(each, s, workers)


def _reduced(each: Parameter, s: Settings, workers: int) -> Any:
    """A gradient that is scattered over replicas, and the weights that they gather; all-reduced where it does not divide."""
    ranks = workers * s.size(*each.axes)
    back = choose(each.rows % ranks == 0, s.item, s.gradient)
    return ring(ranks) * each.exists * each.numbers * (s.gradient + back)
