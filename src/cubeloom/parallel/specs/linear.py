"""The linear: `Y[M, N] = X[M, K] · W[K, N]`, M over z, K over `side` and N over the other axis of the plane.

Weights are stored [N, K], as torch does. A convolution is a linear too: its rows are pixels, of which a sample has `pixels`
coming in and going out, and its weight has `kernel_numel` numbers for each pair of features, stored [N, K, …] or, transposed,
[K, N, …]. Its rows are cut by samples.

What one pass moves, in words per rank on the grid (gm, gk, gn) (Table 4.1 of the cube's paper), follows from the layouts:

    x = (gn-1)/gn · MK/(gm gk)      w = (gm-1)/gm · KN/(gk gn)      y = (gk-1)/gk · MN/(gm gn)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from cubeloom.base.grid import Grid
from cubeloom.parallel.arrangement import Arrangement, padded, sectioned
from cubeloom.parallel.config import FREED, KEPT, Batch, ParallelConfig, ShardingPolicy, choose
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

    `sections`: sizes of what its outputs are, one behind another (gates and values); empty: one. Each rank has its equal part
    of every section.

    `queries`: each of the heads is a key and a value that so many queries share. Where attention's input is its output, its
    sections are all queries, all keys and all values.
    """

    k: int
    n: int
    side: Side  # of the input's features
    bias: bool
    kernel_numel: int = 1
    pixels: tuple[int, int] | None = None
    transposed: bool = False
    turn: bool = False  # afterwards redistributed, so that features lie on `side` again
    shares: str | None = None  # the layer whose weight it uses
    heads: int | None = None
    head_axis: Side = "y"
    always_in: bool = False  # rows are cut even where activations rest replicated
    always_out: bool = False
    queries: int | None = None
    sections: tuple[int, ...] = ()
    padded: bool = False  # a loss's head: its outputs are padded where the grid does not divide them
    with_loss: bool = False  # computed together with the cross-entropy that reads it, where the grid allows it

    @property
    def k_axis(self) -> Side:
        return self.side

    @property
    def n_axis(self) -> Side:
        return other(self.side)

    def copies(self, c: ParallelConfig) -> Any:
        """How many ranks of the axis that cuts heads have the same key and value: 1, where it has no more ranks than heads."""
        if self.heads is None or self.queries is None:
            return 1
        ranks = c.size(self.head_axis)
        shared = (ranks % self.heads == 0) & (self.queries % (ranks / self.heads) == 0)
        return choose(shared, ranks / self.heads, 1)

    def held(self, c: ParallelConfig) -> Any:
        """Its output features as the ranks hold them together: padded, or with copies of keys and values."""
        if self.padded:
            return padded_rows(self.n, c)
        return sum(self.held_sections(c)) if self.sections else self.n

    def held_sections(self, c: ParallelConfig) -> tuple[Any, ...]:
        """The sizes of its sections as the ranks hold them together, with copies of keys and values."""
        return tuple(size * copies for size, copies in zip(self.sections, self._section_copies(c), strict=True))

    def _section_copies(self, c: ParallelConfig) -> tuple[Any, ...]:
        copies = self.copies(c) if self._heads_out else 1
        return (1, *(copies for _ in self.sections[1:]))  # of queries there are none

    def arrangement(self, c: ParallelConfig) -> Arrangement | None:
        """Of its outputs, the rows of its bias, on one decomposition; None where they lie as in the serial model."""
        if self.padded:
            return padded(self.n, int(padded_parts(c)))
        if not self.sections:
            return None
        parts = int(c.size(self.n_axis)) * (int(c.size(self.k_axis)) if self.spread_out(c) == "features" else 1)
        return sectioned(self.sections, parts, tuple(map(int, self._section_copies(c))))

    def _weight_arrangement(self, c: ParallelConfig) -> Arrangement | None:
        """Of its weight, whose outputs are rows, or columns where it is transposed."""
        found = self.arrangement(c)
        return replace(found, dim=1) if found is not None and self.transposed else found

    def own_classes(self, c: ParallelConfig, place: int) -> int | None:
        """How many outputs of the rank at this place are no padding; None where all are, as of every layer but a head."""
        arranged = self.arrangement(c)
        if arranged is None:
            return None
        part = arranged.held // int(c.size(self.n_axis))
        filled = arranged.filled(place * part, (place + 1) * part)
        return None if filled == part else filled

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
        if of_heads and self.heads is not None and self.heads * self.copies(c) % c.size("x", "y") == 0:
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
        n = self.held(c)
        x, y = c.samples * into * self.k, c.samples * out * n
        for spread, when in _spreads(c, self.always_in):
            yield from there_and_back(*self.input(spread), x, when=when)
            if spread == "rows":  # an input of which only the shard was kept
                yield Transfer("W", *self.input(spread), x, when=when & c.regathered)
        for spread, when in _spreads(c, self.always_out):
            yield from there_and_back(*self.output(spread), y, when=when)
        if self.turn:
            yield from there_and_back(*self.turned, y)
        rest, used = self.weight(cut=True)
        yield from weight_transfers(rest, used, self.k * n * self.kernel_numel, c)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        n, arranged, of_weight = self.held(c), partial(self.arrangement, c), partial(self._weight_arrangement, c)
        first, second = (self.k, n) if self.transposed else (n, self.k)
        name, shape = f"{self.shares or self.name}.weight", (first, second, self.kernel_numel)
        yield Parameter(name, shape, self.weight(cut=True)[0], ("data",), c.weights_cut, of_weight)
        yield Parameter(name, shape, self.weight(cut=False)[0], ROWS, 1 - c.weights_cut, of_weight)
        if self.bias:
            layout, all_rows = Layout.of(first=self.bias_axis), rows_of(self.bias_axis, True)
            # Scattered by features, each rank of the other axis uses another part of the bias: a summand of its gradient.
            cut = c.sharded | self.always_out
            yield Parameter(f"{self.name}.bias", (n,), layout, all_rows, cut, arranged)
            yield Parameter(f"{self.name}.bias", (n,), layout, ROWS, 1 - cut, arranged)

    def products(self, c: ParallelConfig) -> Iterator[Product]:
        rows = c.rows(None if self.pixels is None else self.pixels[1])
        yield Product(rows, self.k / c.size(self.k_axis), self.held(c) / c.size(self.n_axis), self.kernel_numel)

    def touched(self, c: ParallelConfig) -> Touched:
        (product,) = self.products(c)
        at_rest = product.rows * product.n / c.row_parts(self.k_axis, self.always_out) * c.item
        return Touched(5 * at_rest, 3 * at_rest)  # the bias, and behind a block's last linear the residual stream

    def saved(self, c: ParallelConfig) -> Any:
        """Its input, whole or the shard."""
        whole = c.rows(self.pixels[0] if self.pixels else None) * self.k / c.size(self.k_axis) * c.item
        return whole / choose((c.sharded | self.always_in) & c.regathered, c.size(self.n_axis), 1)

    def rows_in(self, c: ParallelConfig) -> Any:
        """Of one rank of data and z."""
        return c.rows(self.pixels[0] if self.pixels else None)

    def rows_out(self, c: ParallelConfig) -> Any:
        return c.rows(self.pixels[1] if self.pixels else None)

    def flops(self, sequence: int) -> float:
        return 2.0 * self.k * self.n * self.kernel_numel * (self.pixels[1] if self.pixels else sequence)

    def fits_loss(self, c: ParallelConfig) -> Any:
        """Where a head can be computed together with its loss: its logits need no sum, and its backward gathers nothing."""
        gathered_again = (c.size(self.n_axis) > 1) & (c.sharded | self.always_in) & c.regathered
        return (c.size(self.k_axis) == 1) & (1 - c.gathers) & (1 - gathered_again) & self.with_loss

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        label = "features of a linear over x, y and z"
        of_k, of_n = (("z",), ()) if self.transposed else ((), ("z",))
        outputs = "output features" if self.queries is None else f"output features {self.n}, with copies"
        for what, size, axis, more in (
            ("input features", self.k, self.k_axis, of_k),
            (outputs, self.held(c), self.n_axis, of_n),
        ):
            yield from divides(label, what, size, c, axis, when=not more or 1 - c.weights_cut)
            yield from divides(label, what, size, c, axis, *more, when=bool(more) and c.weights_cut)
        if not self._heads_out:  # else their heads divide
            for number, size in enumerate(self.sections):
                yield from divides(label, f"section {number} of the output features,", size, c, self.n_axis)
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
        if self.queries is None or self.queries == 1:
            yield from divides(label, "heads", heads, c, self.head_axis)
        else:
            ranks = c.size(self.head_axis)
            broken = (heads % ranks != 0) & (self.copies(c) == 1)
            yield Rule(label, broken, partial(key_value_problem, heads, self.queries, self.head_axis, ranks))

        def words() -> str:
            return (
                f"heads {heads} cannot be cut over x={c.x}·y={c.y}, nor the {c.samples_of} sequences of one z rank over "
                f"{across}={c.size(across)}"
            )

        broken = (heads * self.copies(c) % c.size("x", "y") != 0) & (c.samples_of % c.size(across) != 0)
        yield Rule(label, broken, words)


def padded_parts(c: ParallelConfig) -> Any:
    """In how many parts rows of a table or a head are cut: they lie on y, and within that on z where weights are cut there."""
    return c.size("y") * choose(c.weights_cut, c.z, 1)


def padded_rows(rows: int, c: ParallelConfig) -> Any:
    parts = padded_parts(c)
    return -(-rows // parts) * parts


def key_value_problem(heads: int, queries: int, axis: str, ranks: Any) -> str:
    """What is wrong with so many key-value heads on an axis of so many ranks, and the nearest sizes of the axis that work."""
    ranks = int(ranks)
    works = [n for n in range(1, heads * queries + 1) if not heads % n or not (n % heads or queries % (n // heads))]
    near = [max((size for size in works if size < ranks), default=0), min((s for s in works if s > ranks), default=0)]
    nearest = f"the nearest that work: {' and '.join(f'{axis}={size}' for size in near if size)}"
    if ranks % heads:
        return (
            f"key-value heads {heads} cannot be cut over {axis}={ranks}, of which neither divides the other; {nearest}"
        )
    return (
        f"the {queries} queries of each of {heads} key-value heads cannot be cut into {ranks // heads} parts, as "
        f"{axis}={ranks} has ranks for a head; {nearest}"
    )


def shared_copies(specs: Iterable[LayerSpec], grid: Grid) -> set[tuple[str, int]]:
    """The groups that sum gradients of copies: on which axis, and of how many neighbours."""
    config = ParallelConfig.exact(grid, ShardingPolicy(), Batch(1, 1), item=1)
    linears = [spec for spec in specs if isinstance(spec, LinearSpec)]
    arranged = [(spec.n_axis, spec.arrangement(config)) for spec in linears if spec.queries is not None]
    return {(axis, rows.copies) for axis, rows in arranged if rows is not None and rows.copies > 1}


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
