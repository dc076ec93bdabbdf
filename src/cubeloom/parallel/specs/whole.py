"""Layers at the edges of the cube, with whole features on one or both sides, and joins of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.layout import Layout
from cubeloom.parallel.specs.linear import rows_divide
from cubeloom.parallel.specs.norm import vectors
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

_WHOLE = Layout.of(rows=ROWS, features=None)


@dataclass(frozen=True, kw_only=True)
class _Passing(LayerSpec):
    """A layer whose time and memory do not count, because it passes on its input or a few elements of it."""

    def touched(self, c: ParallelConfig) -> Touched:
        return Touched()

    def saved(self, c: ParallelConfig) -> Any:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class ReplicatedSpec(LayerSpec):
    """A small linear that every rank of x and y computes in full on replicated input, one row per sample."""

    k: int
    n: int
    bias: bool

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (_WHOLE,)

    def gives(self, c: ParallelConfig) -> Layout:
        return _WHOLE

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        yield Parameter(f"{self.name}.weight", (self.n, self.k), Layout.of(first=None), ROWS)
        if self.bias:
            yield Parameter(f"{self.name}.bias", (self.n,), Layout.of(first=None), ROWS)

    def products(self, c: ParallelConfig) -> Iterator[Product]:
        yield Product(c.samples_of, self.k, self.n)

    def touched(self, c: ParallelConfig) -> None:
        return None

    def saved(self, c: ParallelConfig) -> Any:
        return c.samples_of * self.k * c.item

    def flops(self, sequence: int) -> float:
        return 2.0 * self.k * self.n


@dataclass(frozen=True, kw_only=True)
class FirstTokenSpec(_Passing):
    """The first token of each sequence, with whole features, on every rank of x and y.

    All later layers compute the same on these ranks, so the backward takes a part of the gradient on each.
    """

    features: int

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (stream("x", bool(c.sharded)),)

    def gives(self, c: ParallelConfig) -> Layout:
        return _WHOLE

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        found = Layout.of(rows=ROWS, features="x")
        summed = Layout.of(rows=ROWS, features="x", partial="y")  # zero where another rank has the token
        elements = c.samples * self.features
        yield Transfer("F", summed, _WHOLE, elements, when=c.sharded)
        yield Transfer("F", found, _WHOLE, elements, when=1 - c.sharded)


@dataclass(frozen=True, kw_only=True)
class EdgeSpec(LayerSpec):
    """A linear or convolution of which each rank of the side keeps a fixed part. The rank applies it to its own
    samples.

    - colwise: from replicated features to features on the side;
    - rowwise: from features on the side to few replicated features, such as colours;
    - rowwise_scatter: a small one, such as a skip connection's, from features on the side to features on the side. Each
      rank computes all output features from its input features, and their sum is reduce-scattered by features;
    - grouped: a grouped convolution, of which each rank has whole groups.
    """

    kind: Literal["colwise", "rowwise", "rowwise_scatter", "grouped"]
    side: Side
    k: int
    n: int
    kernel_numel: int
    bias: bool
    pixels: tuple[int, int]
    groups: int = 1
    transposed: bool = False

    @property
    def cuts_inputs(self) -> bool:
        return self.kind in ("rowwise", "rowwise_scatter")

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        if (
            self.kind == "colwise"
        ):  # `CopyToRegion` sums the gradients of all ranks of the plane, where the input was replicated
            return (Layout.of(rows=ROWS, features=None, partial_gradient=("x", "y")),)
        return (stream(self.side, bool(c.sharded)),)

    def gives(self, c: ParallelConfig) -> Layout:
        whole = stream(self.side, bool(c.sharded))
        return whole.with_dims(features=None) if self.kind == "rowwise" else whole

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        into, out = (
            c.samples * pixels * features for pixels, features in zip(self.pixels, (self.k, self.n), strict=True)
        )
        if self.kind == "rowwise":
            for sharded, when in ((True, c.sharded), (False, 1 - c.sharded)):
                rows = rows_of(self.side, sharded)
                summed, whole = (
                    Layout.of(rows=rows, features=None, partial=self.side),
                    Layout.of(rows=rows, features=None),
                )
                yield from there_and_back(summed, whole, out, when=when)
        elif self.kind == "rowwise_scatter":
            own, all_rows = stream(self.side, True), stream(self.side, False)
            summed = own.with_dims(features=None)
            yield from there_and_back(Layout(summed.dims, frozenset({self.side})), own, out)
            # If activations are replicated, each rank takes its own samples, and all outputs are gathered.
            yield from there_and_back(all_rows, own, into, when=1 - c.sharded)
            yield from there_and_back(own, all_rows, out, when=1 - c.sharded)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        first, second = (self.k, self.n) if self.transposed else (self.n, self.k)
        first_is_cut = self.transposed == self.cuts_inputs
        layout = Layout.of(first=self.side if first_is_cut else None, second=None if first_is_cut else self.side)
        shape = (first, second // self.groups, self.kernel_numel)
        cut = 1 if self.kind == "rowwise_scatter" else c.sharded
        yield Parameter(f"{self.name}.weight", shape, layout, rows_of(self.side, True), cut)
        yield Parameter(f"{self.name}.weight", shape, layout, rows_of(self.side, False), 1 - cut)
        if self.bias:
            for each in vectors(self.name, ["bias"], self.n, self.side, c.sharded):
                whole = Layout.of(first=None) if self.kind == "rowwise" else each.layout
                yield Parameter(each.name, each.shape, whole, each.partial, each.when)

    def products(self, c: ParallelConfig) -> Iterator[Product]:
        samples = c.own_samples(self.side, self.kind == "rowwise_scatter")
        k = self.k if self.kind == "colwise" else self.k / c.size(self.side)
        n = self.n / c.size(self.side) if self.kind in ("colwise", "grouped") else self.n
        yield Product(samples * self.pixels[1], k, n / self.groups, self.kernel_numel)

    def touched(self, c: ParallelConfig) -> None:
        return None

    def saved(self, c: ParallelConfig) -> Any:
        k = self.k if self.kind == "colwise" else self.k / c.size(self.side)
        return c.own_samples(self.side, self.kind == "rowwise_scatter") * self.pixels[0] * k * c.item

    def flops(self, sequence: int) -> float:
        return 2.0 * self.k * self.n * self.kernel_numel / self.groups * self.pixels[1]

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        label = "channels over x or y"
        yield from rows_divide(True, c, other(self.side), True if self.kind == "rowwise_scatter" else c.sharded)
        if self.cuts_inputs:
            yield from divides(label, "input features", self.k, c, self.side)
        if self.kind in ("colwise", "rowwise_scatter"):
            yield from divides(label, "output features", self.n, c, self.side)
        if self.kind == "grouped":
            yield from divides(label, "groups", self.groups, c, self.side)


@dataclass(frozen=True, kw_only=True)
class CopyToRegionSpec(_Passing):
    """Sums the gradients of replicated features over x and y once, where many layers of the plane start to use them."""

    features: int

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (_WHOLE,)

    def gives(self, c: ParallelConfig) -> Layout:
        return Layout.of(rows=ROWS, features=None, partial_gradient=("x", "y"))

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        yield from there_and_back(_WHOLE, self.gives(c), c.samples * self.features)

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from rows_divide(True, c, "y", c.sharded)


@dataclass(frozen=True, kw_only=True)
class ConcatSpec(_Passing):
    """Interleaves the features of two tensors in `turns`. The side must divide the turns, so each rank has whole turns."""

    side: Side
    turns: int

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return self.gives(c), self.gives(c)

    def gives(self, c: ParallelConfig) -> Layout:
        return stream(self.side, bool(c.sharded))

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from rows_divide(True, c, other(self.side), c.sharded)
        yield from divides("channels over x or y", "turns of a concatenation,", self.turns, c, self.side)


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec(LayerSpec):
    """A module that calls a linear, GELU and a linear, and then further layers. Compiled, each linear can be one fused
    kernel.

    It computes nothing itself: its layers have their own specs.
    """

    layers: tuple[str, str, str]  # their names in the module
    then: tuple[str, ...] = ()

    def touched(self, c: ParallelConfig) -> None:
        return None

    def saved(self, c: ParallelConfig) -> Any:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class DropoutSpec(_Passing):
    """Dropout of the residual stream, with a mask that depends only on seed, step and position."""

    probability: float

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (self.gives(c),)

    def gives(self, c: ParallelConfig) -> Layout:
        return stream("x", bool(c.sharded))
