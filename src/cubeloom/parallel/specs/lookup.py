"""Lookup tables: the embedding, whose vocabulary is cut, and small tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from cubeloom.parallel.arrangement import Arrangement, padded
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.layout import Layout
from cubeloom.parallel.specs.linear import gradient_scatter, padded_parts, padded_rows, rows_divide
from cubeloom.parallel.specs.spec import (
    ROWS,
    LayerSpec,
    Parameter,
    Rule,
    Touched,
    Transfer,
    divides,
    rows_of,
    stream,
    there_and_back,
)


@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec(LayerSpec):
    """Vocabulary over y, features over x, shards over z: the layout of a head's weight, so that the two can be tied."""

    entries: int
    features: int

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (Layout.of(rows=ROWS),)

    def gives(self, c: ParallelConfig) -> Layout:
        return self.rests(c)

    def rests(self, c: ParallelConfig) -> Layout:
        """The layout of the output, the start of the residual stream."""
        return stream("x", c.sharded)

    @property
    def found(self) -> Layout:
        """The looked-up vectors before the reduction: each rank has those of its vocabulary, a partial sum over y."""
        return Layout.of(rows=ROWS, features="x", partial="y")

    def _weight(self, cut: bool) -> tuple[Layout, Layout]:
        used = Layout.of(first="y", second="x", partial_gradient=ROWS)
        return used.with_dims(first=("y", "z")) if cut else used, used

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        rows = c.samples * c.sequence * self.features
        for sharded, when in ((True, c.sharded), (False, 1 - c.sharded)):
            yield from there_and_back(self.found, stream("x", sharded), rows, when=when, back="W")
        rest, used = self._weight(cut=True)
        elements = self.held(c) * self.features
        yield Transfer("F", rest, used, elements, when=c.weights_cut, of_weight=True)
        yield gradient_scatter(rest, used, elements, c.weights_cut)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        name, shape, arranged = f"{self.name}.weight", (self.held(c), self.features), partial(self.arrangement, c)
        yield Parameter(name, shape, self._weight(cut=True)[0], ("data",), c.weights_cut, arranged)
        yield Parameter(name, shape, self._weight(cut=False)[0], ROWS, 1 - c.weights_cut, arranged)

    def touched(self, c: ParallelConfig) -> Touched:
        nbytes = c.rows() * self.features / c.x * c.item
        return Touched(forward=2 * nbytes, weight_grad=3 * nbytes, operators=3)

    def saved(self, c: ParallelConfig) -> Any:
        return 9 * c.rows()  # index and mask

    def held(self, c: ParallelConfig) -> Any:
        """The number of entries over all ranks, padded if the grid does not divide them."""
        return padded_rows(self.entries, c)

    def arrangement(self, c: ParallelConfig) -> Arrangement | None:
        """Of the table's rows, on one decomposition; None if they are as in the serial model."""
        return padded(self.entries, int(padded_parts(c)))

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from divides("hidden size over x", "features", self.features, c, "x")
        yield from rows_divide(False, c, "y", c.sharded)


@dataclass(frozen=True, kw_only=True)
class TableSpec(LayerSpec):
    """Features over x; entries over y and z, or replicated if there are too few. Each rank looks up its own rows."""

    entries: int
    features: int

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (Layout.of(rows=ROWS),)

    def gives(self, c: ParallelConfig) -> Layout:
        return stream("x", c.sharded)

    def cut(self, c: ParallelConfig) -> Any:
        return self.entries % c.size("y", "z") == 0

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        rest, elements, cut = self._layout(True), self.entries * self.features, self.cut(c)
        for sharded, when in ((True, c.sharded), (False, 1 - c.sharded)):
            # If all ranks of y have the same rows, each takes its part of the gradient.
            used = Layout.of(first=None, second="x", partial_gradient=rows_of("x", sharded))
            yield Transfer("F", rest, used, elements, when=cut & when, of_weight=True)
            yield gradient_scatter(rest, used, elements, cut & when)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        name, shape, cut = f"{self.name}.weight", (self.entries, self.features), self.cut(c)
        yield Parameter(name, shape, self._layout(True), ("data",), cut)
        yield Parameter(name, shape, self._layout(False), rows_of("x", True), (1 - cut) & c.sharded)
        yield Parameter(name, shape, self._layout(False), rows_of("x", False), (1 - cut) & (1 - c.sharded))

    def _layout(self, cut: bool) -> Layout:
        return Layout.of(first=("y", "z") if cut else None, second="x")

    def touched(self, c: ParallelConfig) -> Touched:
        nbytes = c.rows() / c.row_parts("y") * self.features / c.x * c.item
        return Touched(3 * nbytes, 3 * nbytes, operators=3)

    def saved(self, c: ParallelConfig) -> Any:
        return 9 * c.rows() / c.row_parts("y")

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from divides("hidden size over x", "features", self.features, c, "x")
