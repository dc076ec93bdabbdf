"""The closed form of what a proposal moves: bytes that a rank receives along each axis in one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from cubeloom.base.grid import Grid
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.foreign.placed import WHOLE_AXES, Placed, Whole, bias_axes, config_of
from cubeloom.parallel.layout import Layout, redistribute
from cubeloom.parallel.specs import Parameter, collectives, parameters
from cubeloom.parallel.volume import Received, Volume, gradient_volume, named, sum_volume

_ROWS = ("data", "z")


def layer_volume(layer: Placed, grid: Grid, item: int) -> Volume:
    """A cut layer: its own collectives, and what makes features whole at the ends of a chain."""
    config = config_of(grid, layer.sharded, item)
    moved: list[Received] = []
    for call in layer.calls:
        called = replace(layer.spec, pixels=(call.rows_in, call.rows_out))
        moved += [
            (each.axes, each.received) for each in collectives(called, config) if call.gradient or each.phase != "I"
        ]
        moved += _ends(layer, call.rows_in if call.gradient else 0, call.rows_out, config)
    for each in parameters(layer.spec, config).values():
        partial = bias_axes(layer.spec) if each.name.endswith(".bias") else each.partial
        moved.append(gradient_volume(replace(each, partial=partial), config))
    return named(moved, config)


def _ends(layer: Placed, rows_in: int, rows_out: int, config: ParallelConfig) -> Iterator[Received]:
    """A layer that enters takes its part of whole features, whose gradient is gathered; one that leaves gathers its result."""
    spec = layer.spec
    whole = Layout.of(rows=_ROWS, features=None)
    for there, axis, rows, features in (
        (layer.enters, spec.k_axis, rows_in, spec.k),
        (layer.leaves, spec.n_axis, rows_out, spec.n),
    ):
        for move in redistribute(whole.with_dims(features=axis), whole) if there else ():
            elements = config.samples * rows * features
            yield move.axes, move.received(elements * config.item, config.size, config.coordinates)


def whole_volume(whole: Whole, grid: Grid, item: int) -> Volume:
    """A module that is left whole: its gradient is averaged over all ranks."""
    return _summed(whole.summed, WHOLE_AXES, grid, item)


def _summed(numbers: int, axes: tuple[str, ...], grid: Grid, item: int) -> Volume:
    config = config_of(grid, sharded=False, item=item)
    return named([gradient_volume(Parameter("", (numbers,), Layout.of(first=None), axes), config)], config)


def loss_volume(grid: Grid) -> Volume:
    """The mean over the batch: a sum and a count, in double precision."""
    config = config_of(grid, sharded=False)
    return named([sum_volume(2, _ROWS, 8, config)], config)


def data_parallel_volume(numbers: int, grid: Grid, item: int) -> Volume:
    """What data parallelism would move on as many ranks, each with the whole model: all gradients, summed."""
    return _summed(numbers, ("data",), Grid(data=grid.world), item)


def add(*volumes: Volume) -> Volume:
    """By axis."""
    axes = {axis for volume in volumes for axis in volume}
    return {axis: sum((volume.get(axis, Fraction()) for volume in volumes), Fraction()) for axis in axes}


def total(volume: Volume) -> Fraction:
    return sum(volume.values(), Fraction())
