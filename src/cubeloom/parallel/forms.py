"""The form of each layer on a given grid: sizes, axes and how its operands rest. Pure values, no process group.

`apply` builds layers from forms, `volume` sums their communication, `check` asks each what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from cubeloom.base.grid import Grid
from cubeloom.parallel.arrangement import Arrangement
from cubeloom.parallel.cut import Inputs, Side, Weights
from cubeloom.parallel.grouped_heads import groups_of_heads, key_value_problems


class Spread(StrEnum):
    """How an activation rests along the axis that does not index it."""

    REPLICATED = "replicated"
    ROWS = "rows"  # cut further by rows
    FEATURES = "features"  # cut further by features: whole heads


@dataclass(frozen=True)
class Batch:
    """What one step trains on, over the whole grid."""

    samples: int
    sequence: int

    def rows(self, grid: Grid, per_sample: int | None = None) -> int:
        """Tokens of one rank of data and z; `per_sample` where a layer has other rows than tokens, such as pixels."""
        return self.samples * (self.sequence if per_sample is None else per_sample) // (grid.data * grid.z)

    def samples_of(self, grid: Grid) -> int:
        """Samples of one rank of data and z."""
        return self.samples // (grid.data * grid.z)


def other(side: Side) -> Side:
    return "y" if side == "x" else "x"


def divides(what: str, size: int, grid: Grid, *axes: str) -> Iterator[str]:
    """A complaint unless `size` can be cut over these axes."""
    parts = prod(grid.size(axis) for axis in axes)
    if size % parts:
        cut = "·".join(f"{axis}={grid.size(axis)}" for axis in axes if grid.size(axis) > 1)
        yield f"{what} {size} cannot be cut over {cut}"


def rows_to_cut(by_samples: bool, grid: Grid, batch: Batch) -> tuple[str, int]:
    """What an axis would have to cut, in words and as a number."""
    if by_samples:
        return "samples of one z rank,", batch.samples_of(grid)
    return "rows of one z rank,", batch.rows(grid)


@dataclass(frozen=True)
class Form:
    name: str

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        yield from ()


@dataclass(frozen=True)
class LinearForm(Form):
    """`Y[M,N] = X[M,K] · W[K,N]`, M over z, K over `side` and N over the other. Weights are stored [N, K], as torch does.

    A convolution is one too: its rows are pixels, of which a sample has `pixels` coming in and going out, and its weight has
    `taps` numbers for each pair of features, stored [N, K, …] or, transposed, [K, N, …]. Its rows are cut by samples.
    """

    k: int
    n: int
    side: Side
    inputs: Spread
    outputs: Spread
    weights: Weights
    saved: Inputs
    bias: bool
    heads: int | None = None
    turn: bool = False
    shares: str | None = None  # the layer whose weight this one uses
    head_axis: Side = "y"  # heads lie on it, within what a further cut leaves
    pixels: tuple[int, int] | None = None
    taps: int = 1
    transposed: bool = False
    with_loss: bool = False  # computed together with the cross-entropy that reads its output, some rows at a time
    arranged: Arrangement | None = None  # of the weight's rows and the bias; `n` is then what ranks hold together
    queries: int | None = None  # of each head, where heads are keys and values that they share

    @property
    def whole_n(self) -> int:
        """Output features of the plain layer."""
        return self.n if self.arranged is None else self.arranged.whole

    @property
    def k_axis(self) -> Side:
        return self.side

    @property
    def n_axis(self) -> Side:
        return other(self.side)

    @property
    def bias_axis(self) -> Side:
        """The axis that cuts the bias: the one on which the output's features lie at the end."""
        return self.k_axis if self.turn else self.n_axis

    @property
    def bias_replicas(self) -> tuple[str, ...]:
        """The axes along which the same bias meets different rows, or of which each rank uses another part of it."""
        across = other(self.bias_axis)
        return ("data", "z") if self.outputs == Spread.REPLICATED else ("data", "z", across)

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        sharding = () if self.weights == "replicated" else ("z",)
        first, second = (sharding, ()) if self.transposed else ((), sharding)
        yield from divides("input features", self.k, grid, self.k_axis, *first)
        outputs = "output features" if self.n == self.whole_n else f"output features {self.whole_n}, with copies"
        yield from divides(outputs, self.n, grid, self.n_axis, *second)
        if self.turn:
            yield from divides("output features", self.n, grid, self.k_axis)
        what, rows = rows_to_cut(self.pixels is not None, grid, batch)
        if self.inputs == Spread.ROWS:
            yield from divides(what, rows, grid, self.n_axis)
        if self.outputs == Spread.ROWS:
            yield from divides(what, rows, grid, self.k_axis)
        if self.heads is not None:
            yield from self._head_problems(grid, batch, self.heads)

    def _head_problems(self, grid: Grid, batch: Batch, heads: int) -> Iterator[str]:
        ranks, across = grid.size(self.head_axis), other(self.head_axis)
        if self.queries is None or self.queries == 1:
            yield from divides("heads", heads, grid, self.head_axis)
        else:
            yield from key_value_problems(heads, self.queries, self.head_axis, ranks)
        groups, samples = groups_of_heads(heads, self.queries, ranks), batch.samples_of(grid)
        if groups % (grid.x * grid.y) and samples % grid.size(across):
            yield (
                f"heads {heads} cannot be cut over x={grid.x}·y={grid.y}, nor the {samples} sequences of one z rank over "
                f"{across}={grid.size(across)}"
            )


@dataclass(frozen=True)
class NormForm(Form):
    features: int
    centred: bool  # LayerNorm subtracts the mean, RMSNorm does not
    bias: bool
    rows: Spread

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        yield from divides("features", self.features, grid, "x")


@dataclass(frozen=True)
class EmbeddingForm(Form):
    entries: int
    features: int
    rows: Spread
    weights: Weights
    arranged: Arrangement | None = None  # of the table's rows; `entries` is then what ranks hold together

    @property
    def whole_entries(self) -> int:
        """Entries of the plain table."""
        return self.entries if self.arranged is None else self.arranged.whole

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        yield from divides("features", self.features, grid, "x")
        if self.rows == Spread.ROWS:
            yield from divides("rows of one z rank,", batch.rows(grid), grid, "y")


@dataclass(frozen=True)
class TableForm(Form):
    entries: int
    features: int
    rows: Spread
    sharded: bool  # entries over y and z; a table too small for that is replicated along them

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        yield from divides("features", self.features, grid, "x")


@dataclass(frozen=True)
class DropoutForm(Form):
    probability: float
    rows: Spread


@dataclass(frozen=True)
class LossForm(Form):
    smoothing: float
    ignored: int
    whole: bool
    head: str | None = None  # the layer whose outputs are its logits
    arranged: Arrangement | None = None  # of the classes, as the head has them


@dataclass(frozen=True)
class FirstTokenForm(Form):
    features: int
    rows: Spread


@dataclass(frozen=True)
class WholeForm(Form):
    k: int
    n: int
    bias: bool
