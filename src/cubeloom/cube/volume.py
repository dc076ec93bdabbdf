"""The closed form: bytes that a rank receives along each axis in one training step, from the sizes alone.

For a matmul `[M,K]·[K,N]` on the grid (m, k, n) one pass moves, in words per rank (`reference` Table 4.1),

    x = (gn-1)/gn · MK/(gm gk)      w = (gm-1)/gm · KN/(gk gn)      y = (gk-1)/gk · MN/(gm gn)

and a replicated operand moves 2x (or 2w, 2y) in the one pass in which it is summed, where a sharded one moves x in each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from cubeloom.cube.forms import (
    Batch,
    EmbeddingForm,
    FirstTokenForm,
    Form,
    LinearForm,
    LossForm,
    NormForm,
    Spread,
    TableForm,
    WholeForm,
)
from cubeloom.grid import Grid

Volume = dict[str, Fraction]


@dataclass(frozen=True)
class Words:
    """Bytes of one number: of activations, weights and gradients, and of sums over features (at least float32)."""

    item: int

    @property
    def statistic(self) -> int:
        return max(self.item, 4)


def step_volume(
    forms: Iterable[Form],
    grid: Grid,
    batch: Batch,
    item: int,
    coordinates: Mapping[str, int] | None = None,
) -> Volume:
    """Bytes received by one rank in one forward and backward with its gradient reduction, by axis.

    All ranks receive the same, except in a turn on a plane x × y that is not square: `coordinates` says which rank, or the
    first.
    """
    words = Words(item)
    total: dict[str, Fraction] = defaultdict(Fraction)
    for form in forms:
        for axis, size in layer_volume(form, grid, batch, words, coordinates or grid.coordinates(0)).items():
            total[axis] += size
    return {axis: size for axis, size in total.items() if size}


def layer_volume(form: Form, grid: Grid, batch: Batch, words: Words, coordinates: Mapping[str, int]) -> Volume:
    match form:
        case LinearForm():
            return _linear(form, grid, batch, words, coordinates)
        case NormForm():
            return _norm(form, grid, batch, words)
        case EmbeddingForm():
            return _embedding(form, grid, batch, words)
        case TableForm():
            return _table(form, grid, batch, words)
        case LossForm():
            return _loss(form, grid, batch, words)
        case FirstTokenForm():
            return _first_token(form, grid, batch, words)
        case WholeForm():
            return _gradient(form.k * form.n + form.bias * form.n, ("data", "z"), grid, words)
    return {}


def matmul_words(form: LinearForm, grid: Grid, rows: int) -> tuple[Fraction, Fraction, Fraction]:
    """(x, w, y) of the module's docstring; `rows` are those of one z rank, M/gm."""
    gm, gk, gn = grid.z, grid.size(form.k_axis), grid.size(form.n_axis)
    x = _ring(gn) * Fraction(rows * form.k, gk)
    w = _ring(gm) * Fraction(form.k * form.n, gk * gn)
    y = _ring(gk) * Fraction(rows * form.n, gn)
    return x, w, y


def _ring(parts: int) -> Fraction:
    return Fraction(parts - 1, parts)


def _add(*volumes: Volume) -> Volume:
    total: dict[str, Fraction] = defaultdict(Fraction)
    for volume in volumes:
        for axis, size in volume.items():
            total[axis] += size
    return total


def _gradient(count: Fraction | int, axes: tuple[str, ...], grid: Grid, words: Words) -> Volume:
    """All-reduce of a gradient of so many local numbers over these axes, as one group."""
    wide = [axis for axis in axes if grid.size(axis) > 1]
    ranks = prod(grid.size(axis) for axis in wide)
    return {"+".join(wide): 2 * _ring(ranks) * count * words.item} if wide else {}


def _linear(form: LinearForm, grid: Grid, batch: Batch, words: Words, coordinates: Mapping[str, int]) -> Volume:
    rows = batch.rows(grid)
    x, w, y = (size * words.item for size in matmul_words(form, grid, rows))
    again = form.saved == "regathered" and form.inputs != Spread.REPLICATED
    local = Fraction(form.k * form.n, grid.x * grid.y)
    moved: list[Volume] = [{form.n_axis: (3 if again else 2) * x}, {form.k_axis: 2 * y}]
    if form.weights != "replicated":
        gathers = 2 if form.weights == "freed" else 1  # freed, it is gathered again for the input gradient
        moved.append({"z": (gathers + 1) * w})
    if not form.shares:
        moved.append(_weight_gradient(form.weights, local, grid, words))
    if form.bias:
        moved.append(_bias_gradient(form, grid, words))
    if form.turn:
        moved.append(_turn(form.n, grid, batch, words, coordinates))
    return _add(*moved)


def _weight_gradient(weights: str, local: Fraction, grid: Grid, words: Words) -> Volume:
    """What is left to sum: over data after a reduce-scatter along z, over data and z of a replicated weight."""
    if weights == "replicated":
        return _gradient(local, ("data", "z"), grid, words)
    return _gradient(local / grid.z, ("data",), grid, words)


def _bias_gradient(form: LinearForm, grid: Grid, words: Words) -> Volume:
    return _gradient(Fraction(form.n, grid.size(form.bias_axis)), form.bias_replicas, grid, words)


def _turn(features: int, grid: Grid, batch: Batch, words: Words, coordinates: Mapping[str, int]) -> Volume:
    """A rank keeps what its old and its new block have in common and receives the rest, and the reverse in the backward.

    Old: part ix of X of the rows, iy of Y of the features. New: part iy of Y of the rows, ix of X of the features.
    """
    ix, iy = coordinates["x"], coordinates["y"]
    low = max(Fraction(ix, grid.x), Fraction(iy, grid.y))
    high = min(Fraction(ix + 1, grid.x), Fraction(iy + 1, grid.y))
    common = max(high - low, Fraction(0)) ** 2
    whole = batch.rows(grid) * features * words.item
    return {_join("x", "y", grid=grid): 2 * whole * (Fraction(1, grid.x * grid.y) - common)}


def _norm(form: NormForm, grid: Grid, batch: Batch, words: Words) -> Volume:
    sharded = form.rows == Spread.ROWS
    rows = Fraction(batch.rows(grid), grid.y if sharded else 1)
    # LayerNorm gathers mean and spread of each part, and sums two numbers a row in the backward; RMSNorm sums one in each.
    numbers = 2 * grid.x + 4 if form.centred else 4
    statistics = _ring(grid.x) * numbers * rows * words.statistic
    vectors = Fraction(form.features * (2 if form.bias else 1), grid.x)
    return _add({"x": statistics}, _gradient(vectors, ("data", "z", "y") if sharded else ("data", "z"), grid, words))


def _embedding(form: EmbeddingForm, grid: Grid, batch: Batch, words: Words) -> Volume:
    local = Fraction(form.entries * form.features, grid.x * grid.y)
    looked_up = 2 * _ring(grid.y) * Fraction(batch.rows(grid) * form.features, grid.x) * words.item
    moved = [{"y": looked_up}, _weight_gradient(form.weights, local, grid, words)]
    if form.weights != "replicated":
        moved.append({"z": 2 * _ring(grid.z) * local * words.item})
    return _add(*moved)


def _table(form: TableForm, grid: Grid, batch: Batch, words: Words) -> Volume:
    local = Fraction(form.entries * form.features, grid.x)
    rows_cut = form.rows == Spread.ROWS
    if not form.sharded:
        return _gradient(local, ("data", "z", "y") if rows_cut else ("data", "z"), grid, words)
    shards = grid.y * grid.z
    gathered = {_join("y", "z", grid=grid): _ring(shards) * local * words.item}
    if rows_cut:
        scattered = {_join("y", "z", grid=grid): _ring(shards) * local * words.item}
    else:  # all ranks of y have the same gradient, and each takes its part of it
        scattered = {"z": _ring(grid.z) * local / grid.y * words.item}
    return _add(gathered, scattered, _gradient(local / shards, ("data",), grid, words))


def _join(*axes: str, grid: Grid) -> str:
    return "+".join(axis for axis in axes if grid.size(axis) > 1) or axes[0]


def _loss(form: LossForm, grid: Grid, batch: Batch, words: Words) -> Volume:
    if form.whole:
        return _gradient(2, ("data", "z"), grid, Words(words.statistic))
    rows = Fraction(batch.rows(grid), grid.x)
    numbers = 3 if not form.smoothing else 4  # largest, sum of exponentials, target's logit, sum of logits
    over_vocabulary = {"y": 2 * _ring(grid.y) * numbers * rows * words.statistic}
    return _add(over_vocabulary, _gradient(2, ("data", "z", "x"), grid, Words(words.statistic)))


def _first_token(form: FirstTokenForm, grid: Grid, batch: Batch, words: Words) -> Volume:
    """Forward only: the backward takes a part of what every rank has."""
    size = Fraction(batch.samples * form.features, grid.data * grid.z) * words.item
    over_rows = {"y": 2 * _ring(grid.y) * size / grid.x} if form.rows == Spread.ROWS else {}
    return _add({"x": _ring(grid.x) * size}, over_rows)
