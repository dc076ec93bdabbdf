"""Norms of a traced model whose features are the second dimension: GroupNorm and BatchNorm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from cubeloom.parallel.arrangement import Arrangement, exchanged
from cubeloom.parallel.config import ParallelConfig, choose
from cubeloom.parallel.layout import Axes, Layout
from cubeloom.parallel.specs.spec import ROWS, LayerSpec, Parameter, Rule, Side, Touched, Transfer, divides
from cubeloom.parallel.specs.traced import PLANE, Call


@dataclass(frozen=True, kw_only=True)
class TracedChannelNormSpec(LayerSpec):
    """A GroupNorm, or a BatchNorm where there are no groups, of features that lie over these axes; without any they are whole.

    `of_batch`: a BatchNorm that normalises with the statistics of the batch, and not with running ones. `remembers`: it adds
    them to running ones, which every rank has whole.
    """

    axes: tuple[Side, ...]
    features: int
    weight: bool
    bias: bool
    calls: tuple[Call, ...]
    groups: int | None = None
    of_batch: bool = False
    remembers: bool = False
    differing: Axes = ()  # along which ranks have the same features, and each a summand of their gradient
    trained: tuple[str, ...] = ("weight", "bias")

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (self.gives(c),)

    def gives(self, c: ParallelConfig) -> Layout:
        return Layout.of(rows=ROWS, features=self.axes)

    def whole_groups(self, c: ParallelConfig) -> Any:
        """Where each rank has whole groups, no statistics travel."""
        assert self.groups is not None
        return self.groups % c.size(*self.axes) == 0

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        for call in self.calls:
            if self.groups is not None:  # sums over all features of a group, for each sample
                summed = Layout.of(rows=ROWS, partial=self.axes)
                yield from self._summed(call, summed, 2 * c.samples * self.groups, 1 - self.whole_groups(c))
            elif self.of_batch:  # sums over all samples, for each feature
                yield from self._summed(call, Layout.of(features=self.axes, partial=ROWS), 2 * self.features, True)
                if self.remembers:
                    yield from self.gathered(2 * self.features)

    def _summed(self, call: Call, summed: Layout, elements: Any, when: Any) -> Iterator[Transfer]:
        whole = Layout(summed.dims)
        yield Transfer("F", summed, whole, elements, "statistic", when)
        yield Transfer("I", summed, whole, elements, "statistic", when & call.back)

    def gathered(self, elements: Any) -> Iterator[Transfer]:
        """A number for each feature, from the ranks that have them: along the inner axis first."""
        for count in range(len(self.axes), 0, -1):
            source, target = (Layout.of(features=self.axes[:place]) for place in (count, count - 1))
            yield Transfer("F", source, target, elements, "statistic")

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        across = tuple(axis for axis in PLANE if axis not in self.axes)
        alike = tuple(axis for axis in across if axis not in self.differing)
        for kind, there in (("weight", self.weight), ("bias", self.bias)):
            if there:
                yield Parameter(
                    f"{self.name}.{kind}",
                    (self.features,),
                    Layout.of(first=self.axes),
                    (*ROWS, *across),
                    True,
                    partial(self._arrangement, c),
                    alike,
                    kind in self.trained,
                )

    def _arrangement(self, c: ParallelConfig) -> Arrangement | None:
        return exchanged(self.features, int(c.y), int(c.x)) if self.axes == ("y", "x") else None

    def touched(self, c: ParallelConfig) -> Touched:
        nbytes = self._numbers(c) * c.item
        return Touched(4 * nbytes, 8 * nbytes, operators=4)

    def saved(self, c: ParallelConfig) -> Any:
        whole = 0 if self.groups is None else self.whole_groups(c)
        return self._numbers(c) * choose(whole, c.item, c.statistic + c.item)

    def _numbers(self, c: ParallelConfig) -> Any:
        """Of its input, on a rank."""
        return sum(call.all_in(c) for call in self.calls) / (c.data * c.z) * self.features / c.size(*self.axes)

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from divides("features of a norm", "features", self.features, c, *self.axes)
