"""The closed form of what a proposal moves: bytes that a rank receives along each axis in one step."""

from __future__ import annotations

from fractions import Fraction

from cubeloom.base.grid import Grid
from cubeloom.parallel.amounts import Summed, Volume, Words, add, gradient_volume, ring, sum_volume
from cubeloom.parallel.foreign.placed import WHOLE_AXES, Placed, Whole, bias_axes
from cubeloom.parallel.volume import gradients, matmul_words


def layer_volume(layer: Placed, grid: Grid, words: Words) -> Volume:
    """A cut layer: the matmul's own, x, w and y of `parallel.volume`, and what makes features whole at the ends of a chain."""
    form, moved = layer.form, list[Volume]()
    for call in layer.calls:
        x, w, y = (size * words.item for size in matmul_words(form, grid, call.rows_in, call.rows_out))
        moved.append({form.k_axis: 2 * y})
        if form.weights != "replicated":
            # Gathered again only for the input's gradient; the weight's own is scattered.
            moved.append({"z": (2 if call.gradient else 1) * w + w * words.gradient / words.item})
        if call.gradient:
            moved.append({form.n_axis: 2 * x})
        if call.gradient and layer.enters:
            moved.append({form.k_axis: _gather(grid.size(form.k_axis), call.rows_in * form.k, words)})
        if layer.leaves:
            moved.append({form.n_axis: _gather(grid.size(form.n_axis), call.rows_out * form.n, words)})
    summed = gradients(form, grid)
    if form.bias:
        summed[f"{form.name}.bias"] = Summed(Fraction(form.n, grid.size(form.bias_axis)), bias_axes(form))
    return add(*moved, *(gradient_volume(part, grid, words) for part in summed.values()))


def whole_volume(whole: Whole, grid: Grid, words: Words) -> Volume:
    """A module that is left whole: its gradient is averaged over all ranks."""
    return gradient_volume(Summed(Fraction(whole.summed), WHOLE_AXES), grid, words)


def loss_volume(grid: Grid) -> Volume:
    """The mean over the batch: a sum and a count, in double precision."""
    return sum_volume(Summed(Fraction(2), ("data", "z")), grid, Words(8))


def data_parallel_volume(numbers: int, grid: Grid, words: Words) -> Volume:
    """What data parallelism would move on as many ranks, each with the whole model: all gradients, summed."""
    return gradient_volume(Summed(Fraction(numbers), ("data",)), Grid(data=grid.world), words)


def total(volume: Volume) -> Fraction:
    return sum(volume.values(), Fraction())


def _gather(parts: int, numbers: int, words: Words) -> Fraction:
    return ring(parts) * numbers * words.item
