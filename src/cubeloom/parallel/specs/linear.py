"""The linear: `Y[M, N] = X[M, K] · W[K, N]`, M over z, K over `side` and N over the other axis of the plane.

Weights are stored [N, K], as in torch. A convolution is a linear too: its rows are pixels, `pixels` per sample for
input and output, and they are cut by samples. Its weight has `kernel_numel` elements per pair of features, stored [N,
K, …] or, if transposed, [K, N, …].

The elements that a rank receives in one pass on the grid (gm, gk, gn) (Table 4.1 of the cube's paper) follow from the
layouts:

    x = (gn-1)/gn · MK/(gm gk)      w = (gm-1)/gm · KN/(gk gn)      y = (gk-1)/gk · MN/(gm gn)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from cubeloom.base.grid import Grid
from cubeloom.parallel.arrangement import Arrangement, padded, sectioned
from cubeloom.parallel.config import FREED, KEPT, Batch, Element, ParallelConfig, ShardingPolicy, choose
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

# How an activation is stored along the axis that does not index it: cut by rows, cut by features (whole heads), or
# replicated.
Spread = Literal["rows", "features", "replicated"]


@dataclass(frozen=True, kw_only=True)
class LinearSpec(LayerSpec):
    """A linear. `heads`: the features on attention's side form this many equal groups, and a rank has whole groups.

    If there are enough heads for the whole plane, that side is stored cut further by features; otherwise by rows (whole
    sequences).

    `sections`: sizes of concatenated outputs (gate and up); empty means one. Each rank has an equal part of every
    section.

    `queries`: number of queries that share each key-value head. If the output is attention's input, its sections are
    all queries, all keys and all values.
    """

    k: int
    n: int
    side: Side  # the axis of the input's features
    bias: bool
    kernel_numel: int = 1
    pixels: tuple[int, int] | None = None
    transposed: bool = False
    turn: bool = False  # the output is redistributed, so that features are on `side` again
    shares: str | None = None  # the layer whose weight it shares
    heads: int | None = None
    head_axis: Side = "y"
    always_in: bool = False  # the input's rows are cut even if activations are replicated
    always_out: bool = False
    queries: int | None = None
    sections: tuple[int, ...] = ()
    padded: bool = False  # a loss's head: its outputs are padded if the grid does not divide them
    with_loss: bool = False  # fused with the cross-entropy that reads it, where the grid allows it

    @property
    def takes_fp8(self) -> bool:
        """Whether FP8 applies: a linear on tokens that is not the output layer, nor next to it."""
        last = self.padded or self.with_loss or self.turn or self.shares is not None
        return type(self) is LinearSpec and self.pixels is None and self.kernel_numel == 1 and not last

    @property
    def operand(self) -> Element:
        """What is moved of its input, its weight and its output's gradient."""
        return "operand" if self.takes_fp8 else "item"

    @property
    def k_axis(self) -> Side:
        return self.side

    @property
    def n_axis(self) -> Side:
        return other(self.side)

    def copies(self, c: ParallelConfig) -> Any:
        """Ranks of the axis that cuts heads that share a key and value; 1 if it has no more ranks than heads."""
        if self.heads is None or self.queries is None:
            return 1
        ranks = c.size(self.head_axis)
        shared = (ranks % self.heads == 0) & (self.queries % (ranks / self.heads) == 0)
        return choose(shared, ranks / self.heads, 1)

    def held(self, c: ParallelConfig) -> Any:
        """The number of output features over all ranks, with padding or copies of keys and values."""
        if self.padded:
            return padded_rows(self.n, c)
        return sum(self.held_sections(c)) if self.sections else self.n

    def held_sections(self, c: ParallelConfig) -> tuple[Any, ...]:
        """The sizes of the sections over all ranks, with copies of keys and values."""
        return tuple(size * copies for size, copies in zip(self.sections, self._section_copies(c), strict=True))

    def _section_copies(self, c: ParallelConfig) -> tuple[Any, ...]:
        copies = self.copies(c) if self._heads_out else 1
        return (1, *(copies for _ in self.sections[1:]))  # queries are not copied

    def arrangement(self, c: ParallelConfig) -> Arrangement | None:
        """Of the outputs (the rows of the bias) on one decomposition; None if they are as in the serial model."""
        if self.padded:
            return padded(self.n, int(padded_parts(c)))
        if not self.sections:
            return None
        parts = int(c.size(self.n_axis)) * (int(c.size(self.k_axis)) if self.spread_out(c) == "features" else 1)
        return sectioned(self.sections, parts, tuple(map(int, self._section_copies(c))))

    def _weight_arrangement(self, c: ParallelConfig) -> Arrangement | None:
        """Of the weight, whose outputs are rows, or columns if it is transposed."""
        found = self.arrangement(c)
        return replace(found, dim=1) if found is not None and self.transposed else found

    def own_classes(self, c: ParallelConfig, place: int) -> int | None:
        """Outputs of the rank at this place that are not padding; None if all are (every layer but a head)."""
        arranged = self.arrangement(c)
        if arranged is None:
            return None
        part = arranged.held // int(c.size(self.n_axis))
        filled = arranged.filled(place * part, (place + 1) * part)
        return None if filled == part else filled

    @property
    def bias_axis(self) -> Side:
        """The axis that cuts the bias: the one over which the stored output's features are cut."""
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
        """In storage, and during the matmul: replicated over N's axis, whose ranks each have a partial gradient."""
        return _at_rest(self.k_axis, spread), Layout.of(rows=ROWS, features=self.k_axis, partial_gradient=self.n_axis)

    def output(self, spread: Spread) -> tuple[Layout, Layout]:
        """After the matmul, a partial sum over K's axis; and in storage."""
        return Layout.of(rows=ROWS, features=self.n_axis, partial=self.k_axis), _at_rest(self.n_axis, spread)

    def weight(self, cut: bool) -> tuple[Layout, Layout]:
        """In storage, and gathered along z for the matmul. Its gradient is first a partial sum over all rows."""
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
            yield from there_and_back(*self.input(spread), x, when=when, gathered=self.operand)
            if spread == "rows":  # only the shard of the input was kept
                yield Transfer("W", *self.input(spread), x, self.operand, when & c.regathered)
        for spread, when in _spreads(c, self.always_out):
            yield from there_and_back(*self.output(spread), y, when=when, gathered=self.operand)
        if self.turn:
            yield from there_and_back(*self.turned, y)
        rest, used = self.weight(cut=True)
        yield from weight_transfers(rest, used, self.k * n * self.kernel_numel, c, self.operand)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        n, arranged, of_weight = self.held(c), partial(self.arrangement, c), partial(self._weight_arrangement, c)
        first, second = (self.k, n) if self.transposed else (n, self.k)
        name, shape = f"{self.shares or self.name}.weight", (first, second, self.kernel_numel)
        yield Parameter(name, shape, self.weight(cut=True)[0], ("data",), c.weights_cut, of_weight)
        yield Parameter(name, shape, self.weight(cut=False)[0], ROWS, 1 - c.weights_cut, of_weight)
        if self.bias:
            layout, all_rows = Layout.of(first=self.bias_axis), rows_of(self.bias_axis, True)
            # If the output is scattered by features, each rank of the other axis uses another part of the bias.
            cut = c.sharded | self.always_out
            yield Parameter(f"{self.name}.bias", (n,), layout, all_rows, cut, arranged)
            yield Parameter(f"{self.name}.bias", (n,), layout, ROWS, 1 - cut, arranged)

    def products(self, c: ParallelConfig) -> Iterator[Product]:
        rows = c.rows(None if self.pixels is None else self.pixels[1])
        yield Product(rows, self.k / c.size(self.k_axis), self.held(c) / c.size(self.n_axis), self.kernel_numel)

    def touched(self, c: ParallelConfig) -> Touched:
        (product,) = self.products(c)
        out = product.rows * product.n / c.row_parts(self.k_axis, self.always_out) * c.item
        return Touched(weight_grad=out if self.bias else 0.0)  # the bias itself is added by the product

    def saved(self, c: ParallelConfig) -> Any:
        """Bytes of its input, gathered or the shard."""
        whole = c.rows(self.pixels[0] if self.pixels else None) * self.k / c.size(self.k_axis)
        return (
            whole
            * c.bytes_of(self.operand)
            / choose((c.sharded | self.always_in) & c.regathered, c.size(self.n_axis), 1)
        )

    def rows_in(self, c: ParallelConfig) -> Any:
        """Input rows on one rank of data and z."""
        return c.rows(self.pixels[0] if self.pixels else None)

    def rows_out(self, c: ParallelConfig) -> Any:
        return c.rows(self.pixels[1] if self.pixels else None)

    def flops(self, sequence: int) -> float:
        return 2.0 * self.k * self.n * self.kernel_numel * (self.pixels[1] if self.pixels else sequence)

    def fits_loss(self, c: ParallelConfig) -> Any:
        """Where a head can be fused with its loss: its logits need no reduction, and its backward no gather."""
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
        if not self._heads_out:  # otherwise the heads divide
            for number, size in enumerate(self.sections):
                yield from divides(label, f"section {number} of the output features,", size, c, self.n_axis)
        if self.turn:
            yield from divides(label, "output features", self.n, c, self.k_axis)
        for axis, always, heads in (
            (self.n_axis, self.always_in, self.heads is not None and not self._heads_out),
            (self.k_axis, self.always_out, self._heads_out),
        ):
            if not heads:  # otherwise the output is cut by heads, or by whole sequences
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
    """The number of parts of the rows of a table or head: y cuts them, and within that z where weights are cut."""
    return c.size("y") * choose(c.weights_cut, c.z, 1)


def padded_rows(rows: int, c: ParallelConfig) -> Any:
    parts = padded_parts(c)
    return -(-rows // parts) * parts


def key_value_problem(heads: int, queries: int, axis: str, ranks: Any) -> str:
    """The error for this many key-value heads on an axis of `ranks`, with the nearest sizes of the axis that work."""
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


def fp8_layers(specs: Iterable[LayerSpec]) -> list[str]:
    """The names of the layers whose operands can be rounded to FP8."""
    return [spec.name for spec in specs if isinstance(spec, LinearSpec) and spec.takes_fp8]


def shared_copies(specs: Iterable[LayerSpec], grid: Grid) -> set[tuple[str, int]]:
    """The process groups that sum gradients of copies: the axis, and the number of neighbours."""
    config = ParallelConfig.exact(grid, ShardingPolicy(), Batch(1, 1), item=1)
    linears = [spec for spec in specs if isinstance(spec, LinearSpec)]
    arranged = [(spec.n_axis, spec.arrangement(config)) for spec in linears if spec.queries is not None]
    return {(axis, rows.copies) for axis, rows in arranged if rows is not None and rows.copies > 1}


def _at_rest(side: Side, spread: Spread) -> Layout:
    if spread == "features":
        return Layout.of(rows=ROWS, features=(side, other(side)))
    return stream(side, spread == "rows")


def _spreads(c: ParallelConfig, always: bool) -> tuple[tuple[Spread, Any], ...]:
    """How an activation is stored, with the decompositions where it is. Whole heads move as many bytes as rows."""
    return (("rows", True),) if always else (("rows", c.sharded), ("replicated", 1 - c.sharded))


def weight_transfers(
    rest: Layout, used: Layout, elements: int, c: ParallelConfig, element: Element = "item"
) -> Iterator[Transfer]:
    """A weight is all-gathered along z, its gradient reduce-scattered. Over data it stays a partial sum."""
    freed, kept = c.weights == FREED, c.weights == KEPT
    yield Transfer("F", rest, used, elements, element, freed, of_weight=True)
    yield Transfer("F", rest, used, elements, element, kept, of_weight=True, gathered_to_keep=True)
    yield Transfer("I", rest, used, elements, element, freed, of_weight=True)  # gathered again for the input gradient
    yield gradient_scatter(rest, used, elements, c.weights_cut)


def gradient_scatter(rest: Layout, used: Layout, elements: int, when: Any, still: Axes = ("data",)) -> Transfer:
    """Of a gradient that is whole along z. Afterwards it is `still` a partial sum over some axes."""
    summed = Layout(rest.dims, partial=frozenset(still))
    return Transfer("W", used.gradient, summed, elements, "gradient", when, of_weight=True)


def rows_divide(by_samples: bool, c: ParallelConfig, axis: Side, when: Any) -> Iterator[Rule]:
    """The axis must divide the rows of one rank of data and z that it cuts further: by samples, or by tokens."""
    if by_samples:
        yield from divides(
            "samples of a micro-batch over x or y", "samples of one z rank,", c.samples_of, c, axis, when=when
        )
    else:
        yield from divides("rows of a micro-batch over x or y", "rows of one z rank,", c.rows(), c, axis, when=when)
