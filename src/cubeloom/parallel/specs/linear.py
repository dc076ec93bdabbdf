"""The linear: `Y[M, N] = X[M, K] · W[K, N]`, M over z, K over `side` and N over the other axis of the plane.

Weights are stored [N, K], as torch does. A convolution is a linear too: its rows are pixels, of which a sample has `pixels`
coming in and going out, and its weight has `taps` numbers for each pair of features, stored [N, K, …] or, transposed,
[K, N, …]. Its rows are cut by samples.

What one pass moves, in words per rank on the grid (gm, gk, gn) (Table 4.1 of the cube's paper), follows from the layouts:

    x = (gn-1)/gn · MK/(gm gk)      w = (gm-1)/gm · KN/(gk gn)      y = (gk-1)/gk · MN/(gm gn)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cubeloom.parallel.config import FREED, KEPT, ParallelConfig, choose
from cubeloom.parallel.layout import Axes, Layout
from cubeloom.parallel.specs.spec import (
    ROWS,
    LayerSpec,
    Parameter,
    Product,
    Rule,
    Side,
    Touched,
    Transfer,
    divides,
    other,
    rows_of,
    stream,
    there_and_back,
)

# How an activation rests along the axis that does not index it: cut further by rows, by features (whole heads), or not.
Spread = Literal["rows", "features", "replicated"]


@dataclass(frozen=True, kw_only=True)
class LinearSpec(LayerSpec):
    """`heads`: the features on the side of attention are so many equal groups, which must stay whole.

    Where heads suffice for the whole plane, that side rests cut further by features; otherwise by rows, as whole sequences.
    """

    k: int
    n: int
    side: Side  # of the input's features
    bias: bool
    taps: int = 1
    pixels: tuple[int, int] | None = None
    transposed: bool = False
    turn: bool = False  # afterwards redistributed, so that features lie on `side` again
    shares: str | None = None  # the layer whose weight it uses
    heads: int | None = None
    head_axis: Side = "y"
    always_in: bool = False  # rows are cut even where activations rest replicated
    always_out: bool = False
    with_loss: bool = False  # computed together with the cross-entropy that reads it, where the grid allows it

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
    def _heads_out(self) -> bool:
        return self.heads is not None and self.head_axis == self.n_axis

    def spread_in(self, c: ParallelConfig) -> Spread:
        return self._spread(c, self.always_in, self.heads is not None and not self._heads_out)

    def spread_out(self, c: ParallelConfig) -> Spread:
        return self._spread(c, self.always_out, self._heads_out)

    def _spread(self, c: ParallelConfig, always: bool, of_heads: bool) -> Spread:
        if of_heads and self.heads is not None and self.heads % c.size("x", "y") == 0:
            return "features"
        return "rows" if always or c.sharded else "replicated"

    def input(self, spread: Spread) -> tuple[Layout, Layout]:
        """At rest, and as the product uses it: the ranks of N's axis have the same, each with a summand of its gradient."""
        return _at_rest(self.k_axis, spread), Layout.of(rows=ROWS, features=self.k_axis, partial_gradient=self.n_axis)

    def output(self, spread: Spread) -> tuple[Layout, Layout]:
        """As the product leaves it, a partial sum over K's axis, and at rest."""
        return Layout.of(rows=ROWS, features=self.n_axis, partial=self.k_axis), _at_rest(self.n_axis, spread)

    def weight(self, cut: bool) -> tuple[Layout, Layout]:
        """At rest, and whole along z for its use. After a backward its gradient is a partial sum over all rows."""
        first, second = (self.k_axis, self.n_axis) if self.transposed else (self.n_axis, self.k_axis)
        used = Layout.of(first=first, second=second, partial_gradient=ROWS)
        return used.with_dims(first=(first, "z")) if cut else used, used

    @property
    def turned(self) -> tuple[Layout, Layout]:
        return stream(self.n_axis, True), stream(self.k_axis, True)

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (self.input(self.spread_in(c))[0],)

    def gives(self, c: ParallelConfig) -> Layout:
        return self.turned[1] if self.turn else self.output(self.spread_out(c))[1]

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        into, out = (c.sequence, c.sequence) if self.pixels is None else self.pixels
        x, y = c.samples * into * self.k, c.samples * out * self.n
        for spread, when in _spreads(c, self.always_in):
            yield from there_and_back(*self.input(spread), x, when=when)
            if spread == "rows":  # an input of which only the shard was kept
                yield Transfer("W", *self.input(spread), x, when=when & c.regathered)
        for spread, when in _spreads(c, self.always_out):
            yield from there_and_back(*self.output(spread), y, when=when)
        if self.turn:
            yield from there_and_back(*self.turned, y)
        rest, used = self.weight(cut=True)
        yield from weight_transfers(rest, used, self.k * self.n * self.taps, c)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        first, second = (self.k, self.n) if self.transposed else (self.n, self.k)
        name, shape = f"{self.shares or self.name}.weight", (first, second, self.taps)
        yield Parameter(name, shape, self.weight(cut=True)[0], ("data",), c.weights_cut)
        yield Parameter(name, shape, self.weight(cut=False)[0], ROWS, 1 - c.weights_cut)
        if self.bias:
            layout, all_rows = Layout.of(first=self.bias_axis), rows_of(self.bias_axis, True)
            # Scattered by features, each rank of the other axis uses another part of the bias: a summand of its gradient.
            cut = c.sharded | self.always_out
            yield Parameter(f"{self.name}.bias", (self.n,), layout, all_rows, cut)
            yield Parameter(f"{self.name}.bias", (self.n,), layout, ROWS, 1 - cut)

    def products(self, c: ParallelConfig) -> Iterator[Product]:
        rows = c.rows(None if self.pixels is None else self.pixels[1])
        yield Product(rows, self.k / c.size(self.k_axis), self.n / c.size(self.n_axis), self.taps)

    def touched(self, c: ParallelConfig) -> Touched:
        (product,) = self.products(c)
        at_rest = product.rows * product.n / c.further(self.k_axis, self.always_out) * c.item
        return Touched(5 * at_rest, 3 * at_rest)  # the bias, and behind a block's last linear the residual stream

    def saved(self, c: ParallelConfig) -> Any:
        """Its input, whole or the shard."""
        whole = c.rows(self.pixels[0] if self.pixels else None) * self.k / c.size(self.k_axis) * c.item
        return whole / choose((c.sharded | self.always_in) & c.regathered, c.size(self.n_axis), 1)

    def flops(self, sequence: int) -> float:
        return 2.0 * self.k * self.n * self.taps * (self.pixels[1] if self.pixels else sequence)

    def fits_loss(self, c: ParallelConfig) -> Any:
        """Where a head can be computed together with its loss: its logits need no sum, and its backward gathers nothing."""
        gathered_again = (c.size(self.n_axis) > 1) & (c.sharded | self.always_in) & c.regathered
        return (c.size(self.k_axis) == 1) & (1 - c.gathers) & (1 - gathered_again) & self.with_loss

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        label = "features of a linear over x, y and z"
        of_k, of_n = (("z",), ()) if self.transposed else ((), ("z",))
        for what, size, axis, more in (("input", self.k, self.k_axis, of_k), ("output", self.n, self.n_axis, of_n)):
            yield from divides(label, f"{what} features", size, c, axis, when=not more or 1 - c.weights_cut)
            yield from divides(label, f"{what} features", size, c, axis, *more, when=bool(more) and c.weights_cut)
        if self.turn:
            yield from divides(label, "output features", self.n, c, self.k_axis)
        for axis, always, heads in (
            (self.n_axis, self.always_in, self.heads is not None and not self._heads_out),
            (self.k_axis, self.always_out, self._heads_out),
        ):
            if not heads:  # else they are cut by heads, or as whole sequences
                yield from rows_divide(self.pixels is not None, c, axis, c.sharded | always)
        if self.heads is not None:
            yield from self._heads_divide(c, self.heads)

    def _heads_divide(self, c: ParallelConfig, heads: int) -> Iterator[Rule]:
        label, across = "heads over x and y", other(self.head_axis)
        yield from divides(label, "heads", heads, c, self.head_axis)

        def words() -> str:
            return (
                f"heads {heads} cannot be cut over x={c.x}·y={c.y}, nor the {c.samples_of} sequences of one z rank over "
                f"{across}={c.size(across)}"
            )

        broken = (heads % c.size("x", "y") != 0) & (c.samples_of % c.size(across) != 0)
        yield Rule(label, broken, words)


def _at_rest(side: Side, spread: Spread) -> Layout:
    if spread == "features":
        return Layout.of(rows=ROWS, features=(side, other(side)))
    return stream(side, spread == "rows")


def _spreads(c: ParallelConfig, always: bool) -> tuple[tuple[Spread, Any], ...]:
    """How it rests, and where; whole heads move the bytes of rows."""
    return (("rows", True),) if always else (("rows", c.sharded), ("replicated", 1 - c.sharded))


def weight_transfers(rest: Layout, used: Layout, elements: int, c: ParallelConfig) -> Iterator[Transfer]:
    """A weight is gathered along z for its use, and its gradient scattered back; over data it stays a partial sum."""
    freed, kept = c.weights == FREED, c.weights == KEPT
    yield Transfer("F", rest, used, elements, when=freed, of_weight=True)
    yield Transfer("F", rest, used, elements, when=kept, of_weight=True, gathered_to_keep=True)
    yield Transfer("I", rest, used, elements, when=freed, of_weight=True)  # once more, for the input gradient
    yield gradient_scatter(rest, used, elements, c.weights_cut)


def gradient_scatter(rest: Layout, used: Layout, elements: int, when: Any, still: Axes = ("data",)) -> Transfer:
    """Of a gradient that is whole along z; over some axes it is `still` a partial sum then."""
    summed = Layout(rest.dims, partial=frozenset(still))
    return Transfer("W", used.gradient, summed, elements, "gradient", when, of_weight=True)


def rows_divide(by_samples: bool, c: ParallelConfig, axis: Side, when: Any) -> Iterator[Rule]:
    """The rows of one rank of data and z, over an axis that cuts them further: by samples, or in tokens."""
    if by_samples:
        yield from divides(
            "samples of a micro-batch over x or y", "samples of one z rank,", c.samples_of, c, axis, when=when
        )
    else:
        yield from divides("rows of a micro-batch over x or y", "rows of one z rank,", c.rows(), c, axis, when=when)
