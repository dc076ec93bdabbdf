"""The closed form: bytes that a rank receives along each axis in one training step, from the sizes alone.

For a matmul `[M,K]·[K,N]` on the grid (m, k, n) one pass moves, in words per rank (`reference` Table 4.1),

    x = (gn-1)/gn · MK/(gm gk)      w = (gm-1)/gm · KN/(gk gn)      y = (gk-1)/gk · MN/(gm gn)

and a replicated operand moves 2x (or 2w, 2y) in the one pass in which it is summed, where a sharded one moves x in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from cubeloom.base.grid import Grid
from cubeloom.parallel.amounts import Summed, Volume, Words, add, gradient_volume, ring, sum_volume
from cubeloom.parallel.cut import GradientDtype
from cubeloom.parallel.forms import (
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
from cubeloom.parallel.image_forms import ImageForm
from cubeloom.parallel.key_values import copies_volume


def step_volume(
    forms: Iterable[Form],
    grid: Grid,
    batch: Batch,
    item: int,
    coordinates: Mapping[str, int] | None = None,
    gradients_in: GradientDtype = "float32",
    zero: bool = False,
) -> Volume:
    """Bytes received by one rank in one forward and backward with its gradient reduction, by axis.

    All ranks receive the same, except in a turn on a plane x × y that is not square: `coordinates` says which rank, or the
    first. `zero`: optimizer states are sharded over replicas, which gather the weights that each has updated.
    """
    forms, words, here = list(forms), Words(item, gradients_in), coordinates or grid.coordinates(0)
    parts = [pass_volume(form, grid, batch, words, here) for form in forms]
    summed = {name: part for form in forms for name, part in gradients(form, grid).items()}
    parts.append(copies_volume(forms, grid, words, here, zero))
    return add(*parts, *(gradient_volume(part, grid, words, zero=zero) for part in summed.values()))


def layer_volume(form: Form, grid: Grid, batch: Batch, words: Words, coordinates: Mapping[str, int]) -> Volume:
    """One layer's part of a step; a shared weight's gradient is its owner's."""
    own = [part for name, part in gradients(form, grid).items() if name.startswith(f"{form.name}.")]
    passed = pass_volume(form, grid, batch, words, coordinates)
    passed = add(passed, copies_volume([form], grid, words, coordinates))
    return add(passed, *(gradient_volume(part, grid, words) for part in own))


def gradients(form: Form, grid: Grid) -> dict[str, Summed]:
    """What is left to sum of each parameter's gradient after a backward, by the parameter's name."""
    weight = f"{form.name}.weight"
    match form:
        case LinearForm():
            local = Fraction(form.k * form.n * form.taps, grid.x * grid.y)
            first = (form.k, form.k_axis) if form.transposed else (form.n, form.n_axis)
            rows = Fraction(first[0], grid.size(first[1]))
            found = {f"{form.shares or form.name}.weight": _weight_sum(form.weights, local, rows, grid)}
            if form.bias:
                own = Fraction(form.n, grid.size(form.bias_axis))
                found[f"{form.name}.bias"] = Summed(own, form.bias_replicas, own)
            return found
        case NormForm():
            own = Fraction(form.features, grid.x)
            vectors = Summed(own, _row_axes(form.rows), own)
            return {weight: vectors} | ({f"{form.name}.bias": vectors} if form.bias else {})
        case EmbeddingForm():
            local = Fraction(form.entries * form.features, grid.x * grid.y)
            return {weight: _weight_sum(form.weights, local, Fraction(form.entries, grid.y), grid)}
        case TableForm():
            local = Fraction(form.entries * form.features, grid.x)
            return {
                weight: Summed(local / (grid.y * grid.z), ("data",), Fraction(form.entries, grid.y * grid.z))
                if form.sharded
                else Summed(local, _row_axes(form.rows), form.entries)
            }
        case WholeForm():
            found = {weight: Summed(Fraction(form.k * form.n), ("data", "z"), form.n)}
            return found | ({f"{form.name}.bias": Summed(Fraction(form.n), ("data", "z"), form.n)} if form.bias else {})
        case ImageForm():
            return {f"{form.name}.{name}": part for name, part in form.gradients(grid).items()}
    return {}


def _row_axes(rows: Spread) -> tuple[str, ...]:
    """The axes that cut rows of the residual stream."""
    return ("data", "z", "y") if rows == Spread.ROWS else ("data", "z")


def _weight_sum(weights: str, local: Fraction, rows: Fraction, grid: Grid) -> Summed:
    """Over data after a reduce-scatter along z; over data and z of a replicated weight."""
    if weights == "replicated":
        return Summed(local, ("data", "z"), rows)
    return Summed(local / grid.z, ("data",), rows / grid.z)


def pass_volume(
    form: Form,
    grid: Grid,
    batch: Batch,
    words: Words,
    coordinates: Mapping[str, int],
    kept_gathers: Fraction | int = 1,
) -> Volume:
    """Bytes of one forward and backward of a layer, without the sums over replicas.

    `kept_gathers`: how often, in the mean over passes, a weight that is kept until the backward is gathered.
    """
    match form:
        case LinearForm():
            return _linear(form, grid, batch, words, coordinates, kept_gathers)
        case NormForm():
            return _norm(form, grid, batch, words)
        case EmbeddingForm():
            return _embedding(form, grid, batch, words)
        case TableForm():
            return _table(form, grid, words)
        case LossForm():
            return _loss(form, grid, batch, words)
        case FirstTokenForm():
            return _first_token(form, grid, batch, words)
        case ImageForm():
            return form.volume(grid, batch, words)
    return {}


def matmul_words(form: LinearForm, grid: Grid, rows: int, rows_out: int) -> tuple[Fraction, Fraction, Fraction]:
    """(x, w, y) of the module's docstring; `rows` are those of one z rank, M/gm, coming in and going out."""
    gm, gk, gn = grid.z, grid.size(form.k_axis), grid.size(form.n_axis)
    x = ring(gn) * Fraction(rows * form.k, gk)
    w = ring(gm) * Fraction(form.k * form.n * form.taps, gk * gn)
    y = ring(gk) * Fraction(rows_out * form.n, gn)
    return x, w, y


def _linear(
    form: LinearForm,
    grid: Grid,
    batch: Batch,
    words: Words,
    coordinates: Mapping[str, int],
    kept_gathers: Fraction | int,
) -> Volume:
    into, out = form.pixels or (None, None)
    sizes = matmul_words(form, grid, batch.rows(grid, into), batch.rows(grid, out))
    x, w, y = (size * words.item for size in sizes)
    scattered = sizes[1] * words.gradient  # the weight's gradient
    again = form.saved == "regathered" and form.inputs != Spread.REPLICATED
    moved: list[Volume] = [{form.n_axis: (3 if again else 2) * x}, {form.k_axis: 2 * y}]
    if form.weights != "replicated":
        gathers = 2 if form.weights == "freed" else kept_gathers  # freed, it is gathered again for the input gradient
        moved.append({"z": gathers * w + scattered})
    if form.turn:
        moved.append(_turn(batch.rows(grid, out) * form.n * words.item, grid, coordinates))
    return add(*moved)


def _turn(whole: int, grid: Grid, coordinates: Mapping[str, int]) -> Volume:
    """A rank keeps what its old and its new block have in common and receives the rest, and the reverse in the backward.

    `whole` bytes on one z rank. Old: part ix of X of the rows, iy of Y of the features. New: part iy of Y of the rows, ix of X
    of the features.
    """
    ix, iy = coordinates["x"], coordinates["y"]
    low = max(Fraction(ix, grid.x), Fraction(iy, grid.y))
    high = min(Fraction(ix + 1, grid.x), Fraction(iy + 1, grid.y))
    common = max(high - low, Fraction(0)) ** 2
    return {_join("x", "y", grid=grid): 2 * whole * (Fraction(1, grid.x * grid.y) - common)}


def _norm(form: NormForm, grid: Grid, batch: Batch, words: Words) -> Volume:
    rows = Fraction(batch.rows(grid), grid.y if form.rows == Spread.ROWS else 1)
    # LayerNorm gathers mean and spread of each part, and sums two numbers a row in the backward; RMSNorm sums one in each.
    numbers = 2 * grid.x + 4 if form.centred else 4
    return {"x": ring(grid.x) * numbers * rows * words.statistic}


def _embedding(form: EmbeddingForm, grid: Grid, batch: Batch, words: Words) -> Volume:
    looked_up = 2 * ring(grid.y) * Fraction(batch.rows(grid) * form.features, grid.x) * words.item
    local = Fraction(form.entries * form.features, grid.x * grid.y)
    gathered = {} if form.weights == "replicated" else {"z": ring(grid.z) * local * (words.item + words.gradient)}
    return add({"y": looked_up}, gathered)


def _table(form: TableForm, grid: Grid, words: Words) -> Volume:
    if not form.sharded:
        return {}
    numbers, both = Fraction(form.entries * form.features, grid.x), _join("y", "z", grid=grid)
    gathered = {both: ring(grid.y * grid.z) * numbers * words.item}
    if form.rows == Spread.ROWS:
        return add(gathered, {both: ring(grid.y * grid.z) * numbers * words.gradient})  # and scattered back as it came
    # All ranks of y have the same gradient, and each takes its part of it.
    return add(gathered, {"z": ring(grid.z) * numbers * words.gradient / grid.y})


def _join(*axes: str, grid: Grid) -> str:
    return "+".join(axis for axis in axes if grid.size(axis) > 1) or axes[0]


def _loss(form: LossForm, grid: Grid, batch: Batch, words: Words) -> Volume:
    two = Fraction(2)
    if form.whole:
        return sum_volume(Summed(two, ("data", "z")), grid, Words(words.statistic))
    rows = Fraction(batch.rows(grid), grid.x)
    numbers = 3 if not form.smoothing else 4  # largest, sum of exponentials, target's logit, sum of logits
    over_vocabulary = {"y": 2 * ring(grid.y) * numbers * rows * words.statistic}
    return add(over_vocabulary, sum_volume(Summed(two, ("data", "z", "x")), grid, Words(words.statistic)))


def _first_token(form: FirstTokenForm, grid: Grid, batch: Batch, words: Words) -> Volume:
    """Forward only: the backward takes a part of what every rank has."""
    size = Fraction(batch.samples * form.features, grid.data * grid.z) * words.item
    over_rows = {"y": 2 * ring(grid.y) * size / grid.x} if form.rows == Spread.ROWS else {}
    return add({"x": ring(grid.x) * size}, over_rows)
