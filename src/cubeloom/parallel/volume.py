"""The bytes that a rank receives along each axis in one training step, from layouts alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction
from math import prod
from typing import Any

from cubeloom.parallel.config import ParallelConfig, choose
from cubeloom.parallel.layout import Axes, Layout, redistribute
from cubeloom.parallel.specs import LayerSpec, Parameter, collectives, fp8_layers, repeated

Volume = dict[str, Fraction]  # by axis, or by several as one process group, with the ledger's names
Received = tuple[Axes, Any]  # axes, and the bytes received along them


def step_volume(
    layers: Iterable[LayerSpec], c: ParallelConfig, zero: bool = False, again: Sequence[Sequence[LayerSpec]] = ()
) -> Volume:
    """One forward and backward of all layers, with the reduction of their gradients.

    All ranks receive the same, except in a turn on a plane x × y that is not square: `c.place` gives the rank. `zero`:
    optimizer states are sharded over replicas, which gather the weights that each has updated. `again`: blocks that are
    recomputed.
    """
    layers = list(layers)
    passed = [each for layer in layers for each in pass_volume(layer, c)]
    passed += [each for block in again for each in repeated_volume(block, c)]
    # A weight that two layers share is one parameter.
    held = {each.name: each for layer in layers for each in layer.parameters(c) if each.when}.values()
    reduced = (gradient_volume(each, c, zero=zero) for each in held)
    agreed = amax_volume(len(fp8_layers(layers)), c)
    return named([*passed, *reduced, *(copies_volume(each, c, zero=zero) for each in held), *agreed], c)


def layer_volume(layer: LayerSpec, c: ParallelConfig) -> Volume:
    """One layer's part of a step. The gradient of a shared weight belongs to its owner."""
    own = [each for each in layer.parameters(c) if each.when and each.name.startswith(f"{layer.name}.")]
    return named(
        [*pass_volume(layer, c), *(some(each, c) for each in own for some in (gradient_volume, copies_volume))], c
    )


def repeated_volume(block: Sequence[LayerSpec], c: ParallelConfig, kept: Collection[str] = ()) -> Iterator[Received]:
    """What a block receives more in a backward that computes its forward once more."""
    for each, times in repeated(block, c, kept):
        yield each.axes, times * each.received


def pass_volume(layer: LayerSpec, c: ParallelConfig, kept_gathers: Any = 1) -> Iterator[Received]:
    """One forward and backward of a layer, without the reduction of gradients over replicas.

    `kept_gathers`: the mean number of gathers per pass of a weight that is kept until the backward.
    """
    for each in collectives(layer, c):
        yield each.axes, each.received * (kept_gathers if each.gathered_to_keep else 1)


def gradient_volume(parameter: Parameter, c: ParallelConfig, workers: Any = 1, zero: Any = False) -> Received:
    """A gradient reduced over its replicas and, in a pipeline, over the workers of the stage, as one process group.

    An all-reduce is a reduce-scatter of the gradient and an all-gather of the sum. With ZeRO-1 the updated weights are
    gathered instead, if the block's rows divide over the group.
    """
    axes = ("pipe", *parameter.partial)

    def size(*some: str) -> Any:
        return c.size(*(axis for axis in some if axis != "pipe")) * (workers if "pipe" in some else 1)

    (first, cutting), *rest = parameter.layout.dims
    whole = parameter.layout
    scattered = Layout(((first, (*cutting, *axes)), *rest))
    (scatter,) = redistribute(Layout(whole.dims, partial=frozenset(axes)), scattered)
    (gather,) = redistribute(scattered, whole)
    back = choose(zero & (parameter.rows(c) % size(*axes) == 0), c.item, c.gradient)
    numbers = parameter.numbers(c) * c.size(*whole.cutting)
    moved = scatter.received(numbers * c.gradient, size, c.coordinates) + gather.received(
        numbers * back, size, c.coordinates
    )
    return (
        "pipe",
        *parameter.partial,
    ) if workers > 1 else parameter.partial, moved * parameter.when * parameter.trained


def copies_volume(
    parameter: Parameter, c: ParallelConfig, workers: Sequence[int] = (0,), zero: bool = False
) -> Received:
    """The gradients of rows that several ranks have copies of, summed over these ranks; on one decomposition.

    A rank may have none of them: z and, with ZeRO-1, replicas cut rows further. `workers`: those that hold the
    parameter.
    """
    arranged = parameter.arranged()
    if arranged is None or arranged.copies == 1:
        return (), 0
    start, length = 0, arranged.held
    cutting = parameter.layout.dims[arranged.dim][1]
    for axis in cutting:
        length //= int(c.size(axis))
        start += int(c.coordinates[axis]) * length
    others = prod(size for dim, size in enumerate(parameter.shape) if dim != arranged.dim)
    others //= int(
        c.size(*(axis for dim, (_, axes) in enumerate(parameter.layout.dims) if dim != arranged.dim for axis in axes))
    )
    replicas = len(workers) * int(c.size(*parameter.partial))
    if zero and parameter.rows(c) % replicas == 0:
        if arranged.dim:
            others //= replicas
        else:
            place = workers.index(int(c.coordinates["pipe"])) if len(workers) > 1 else 0
            for axis in parameter.partial:
                place = place * int(c.size(axis)) + int(c.coordinates[axis])
            length //= replicas
            start += place * length
    rows = sum(run.length for run in arranged.runs(start, start + length) if run.copies > 1)
    return cutting[:1], 2 * Fraction(arranged.copies - 1, arranged.copies) * rows * others * c.gradient


def sum_volume(elements: Any, axes: Axes, nbytes: int, c: ParallelConfig, workers: int = 1) -> Received:
    """An all-reduce of this many elements."""
    parts = c.size(*(axis for axis in axes if axis != "pipe")) * (workers if "pipe" in axes else 1)
    return axes, 2 * ((parts - 1) / parts) * elements * nbytes


def amax_volume(layers: int, c: ParallelConfig, workers: int = 1) -> Iterator[Received]:
    """The largest values of the operands of so many FP8 layers, agreed between all ranks once a step, in float32."""
    if c.precision == "fp8":
        yield sum_volume(3 * layers, (*(("pipe",) if workers > 1 else ()), "data", "z", "y", "x"), 4, c, workers)


def add(received: Iterable[Received]) -> dict[Axes, Any]:
    total: dict[Axes, Any] = {}
    for axes, size in received:
        total[axes] = total[axes] + size if axes in total else size
    return total


def named(received: Iterable[Received], c: ParallelConfig) -> Volume:
    """For one decomposition: the bytes along each axis, or along several as one process group, with the ledger's names."""
    found: dict[str, Any] = {}
    for axes, size in received:
        label = "+".join(axis for axis in axes if axis == "pipe" or c.size(axis) > 1)
        if size:
            found[label] = found.get(label, 0) + size
    return found
