"""Norms over features that one side cuts: a few statistics per row, group or feature are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cubeloom.parallel.config import ParallelConfig, choose
from cubeloom.parallel.layout import Layout
from cubeloom.parallel.specs.linear import rows_divide
from cubeloom.parallel.specs.spec import (
    LayerSpec,
    Parameter,
    Rule,
    Side,
    Touched,
    Transfer,
    divides,
    other,
    rows_of,
    stream,
)


@dataclass(frozen=True, kw_only=True)
class NormSpec(LayerSpec):
    """LayerNorm (centred) or RMSNorm of the residual stream, features over x. `always`: rows are cut in any case."""

    features: int
    centred: bool  # LayerNorm subtracts the mean, RMSNorm does not
    bias: bool
    weight: bool = True
    always: bool = False

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (self.gives(c),)

    def gives(self, c: ParallelConfig) -> Layout:
        return stream("x", c.sharded or self.always)

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        rows = c.samples * c.sequence
        for sharded, when in ((True, c.sharded | self.always), (False, (1 - c.sharded) & (not self.always))):
            whole = Layout.of(parts=None, rows=rows_of("x", sharded))
            summed = Layout.of(parts=None, rows=rows_of("x", sharded), partial="x")
            if self.centred:  # each part's mean and spread, all-gathered; in the backward two sums per row
                each = whole.with_dims(parts="x")
                yield Transfer("F", each, whole, 2 * c.x * rows, "statistic", when)
            else:
                yield Transfer("F", summed, whole, rows, "statistic", when)
            yield Transfer("I", summed, whole, (2 if self.centred else 1) * rows, "statistic", when)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        kinds = [kind for kind, there in (("weight", self.weight), ("bias", self.bias)) if there]
        yield from vectors(self.name, kinds, self.features, "x", c.sharded | self.always)

    def touched(self, c: ParallelConfig) -> Touched:
        # With the residual sum before it, and the sum of two gradients behind it, one fused operator where features are
        # whole; otherwise several, in float32.
        nbytes = self._rows(c) * self.features / c.x * choose(c.x > 1, 8 * c.statistic, 4 * c.item)
        return Touched(nbytes, nbytes, operators=4)

    def saved(self, c: ParallelConfig) -> Any:
        # Whole features: the input, or for RMSNorm, which torch composes, two tensors in float32. Cut features: the
        # normalised input, and a second copy unless that is float32.
        alone = c.item if self.centred else 2 * c.statistic
        each = choose(c.x > 1, c.item if c.item >= 4 else 2 * c.item, alone)
        return self._rows(c) * (self.features / c.x * each + 2 * c.statistic)

    def _rows(self, c: ParallelConfig) -> Any:
        return c.rows() / c.row_parts("y", self.always)

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from divides("hidden size over x", "features", self.features, c, "x")


def vectors(name: str, kinds: list[str], size: int, side: Side, cut: Any) -> Iterator[Parameter]:
    """Vectors that scale or shift features. Every rank with other rows has a partial gradient."""
    layout = Layout.of(first=side)
    for kind in kinds:
        yield Parameter(f"{name}.{kind}", (size,), layout, rows_of(side, True), cut)
        yield Parameter(f"{name}.{kind}", (size,), layout, rows_of(side, False), 1 - cut)


@dataclass(frozen=True, kw_only=True)
class ImageNormSpec(LayerSpec):
    """GroupNorm, or BatchNorm if there are no groups: sums for the mean, then for the spread; two in the backward, too."""

    side: Side
    features: int
    affine: bool
    pixels: int
    groups: int | None = None
    joined: tuple[int, int, int] | None = None  # features of two interleaved tensors: of each, and the number of turns

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (self.gives(c),)

    def gives(self, c: ParallelConfig) -> Layout:
        return stream(self.side, c.sharded)

    def whole_groups(self, c: ParallelConfig) -> Any:
        """Where each rank has whole groups, no statistics are communicated. Interleaved features are parts of groups."""
        assert self.groups is not None
        return (self.groups % c.size(self.side) == 0) & (self.joined is None)

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        for sharded, when in ((True, c.sharded), (False, 1 - c.sharded)):
            rows = rows_of(self.side, sharded)
            if self.groups is None:  # sums over all samples, per feature
                summed, whole = Layout.of(features=self.side, partial=rows), Layout.of(features=self.side)
                elements, where = self.features, when
            else:  # sums over all features of a group, per sample
                summed, whole = Layout.of(rows=rows, partial=self.side), Layout.of(rows=rows)
                elements, where = c.samples * self.groups, when & (1 - self.whole_groups(c))
            for phase in ("F", "F", "I", "I"):
                yield Transfer(phase, summed, whole, elements, "statistic", where)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        if self.affine:
            yield from vectors(self.name, ["weight", "bias"], self.features, self.side, c.sharded)

    def touched(self, c: ParallelConfig) -> Touched:
        nbytes = self._numbers(c) * c.item
        return Touched(4 * nbytes, 8 * nbytes, operators=4)

    def saved(self, c: ParallelConfig) -> Any:
        whole = 0 if self.groups is None else self.whole_groups(c)
        return self._numbers(c) * choose(whole, c.item, c.statistic + c.item)

    def _numbers(self, c: ParallelConfig) -> Any:
        """Elements of its input on one rank."""
        return c.own_samples(self.side) * self.pixels * self.features / c.size(self.side)

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from rows_divide(True, c, other(self.side), c.sharded)
        yield from divides("channels over x or y", "features", self.features, c, self.side)
