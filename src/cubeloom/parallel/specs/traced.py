"""Layers of a model without a hand-written cut. Between them only features are cut; all rows of a z rank are whole.

An operation between layers may take its sizes from any tensor, because samples and sequences are whole everywhere.

| features | layout | for |
|---|---|---|
| cut over both | [rows, N/(y·x)] | attention by whole heads, inside an MLP |
| cut over one  | [rows, N/y]     | the residual stream, on x |
| whole         | [rows, N]       | operations that need whole features; the gradient is the same on all ranks |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from cubeloom.parallel.arrangement import Arrangement, exchanged, sectioned
from cubeloom.parallel.config import REPLICATED, ParallelConfig, choose
from cubeloom.parallel.layout import Axes, Layout
from cubeloom.parallel.specs.linear import LinearSpec, Spread, gradient_scatter, weight_transfers
from cubeloom.parallel.specs.lookup import EmbeddingSpec
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
    stream,
    there_and_back,
)

FeatureRest = Literal["both", "one", "lazy", "whole"]
PLANE: Axes = ("x", "y")


@dataclass(frozen=True)
class Call:
    """One use of a layer: its rows per sample, such as tokens or pixels, and whether dX is needed.

    `fixed`: the number of rows does not depend on the samples, as for a table of positions. `live`: the loss depends on
    it.
    """

    rows_in: Any
    rows_out: Any
    gradient: bool = True
    fixed: bool = False
    live: bool = True

    @property
    def back(self) -> bool:
        """Whether a backward computes dX."""
        return self.gradient and self.live

    def all_in(self, c: ParallelConfig) -> Any:
        """Rows on all ranks of data and z together."""
        return self._samples(c) * self.rows_in

    def all_out(self, c: ParallelConfig) -> Any:
        return self._samples(c) * self.rows_out

    def _samples(self, c: ParallelConfig) -> Any:
        """Each strand of a weave computes rows that are alike for all samples itself."""
        return c.data * c.z * c.ways if self.fixed else c.samples


def _whole(side: Side) -> tuple[Layout, Layout]:
    """Features on a side, and whole features."""
    return Layout.of(rows=ROWS, features=side), Layout.of(rows=ROWS, features=None)


@dataclass(frozen=True, kw_only=True)
class TracedLinearSpec(LinearSpec):
    """`taken` and `given`: the layout of features before and after. `joins`: the layer that gathers the same input."""

    calls: tuple[Call, ...]
    taken: FeatureRest
    given: FeatureRest
    joins: str | None = None
    shared: bool = False  # ranks use the replicated output differently, so its gradient is summed over them
    kept: tuple[int, ...] = ()  # sections that every rank has whole and uses differently
    trained: tuple[str, ...] = ("weight", "bias")
    rank: int | None = None  # dimensions of its input, if features are not the last

    @property
    def leaves(self) -> bool:
        """Whether its output is all-gathered."""
        return self.given == "whole"

    @property
    def enters(self) -> bool:
        """Whether each rank takes its part of whole input features."""
        return self.taken == "whole"

    def over_z(self, c: ParallelConfig) -> Any:
        """Whether z cuts the weight."""
        first, axis = (self.k, self.k_axis) if self.transposed else (self.held(c), self.n_axis)
        return c.weights_cut & (first % c.size(axis, "z") == 0)

    def arrangement(self, c: ParallelConfig) -> Arrangement | None:
        if not self.kept:
            return super().arrangement(c)
        return sectioned(self.sections, int(c.size(self.n_axis)), (1,) * len(self.sections))

    def _own(self, c: ParallelConfig) -> ParallelConfig:
        return replace(c, weights=choose(self.over_z(c), c.weights, REPLICATED))

    def spread_in(self, c: ParallelConfig) -> Spread:
        return "features" if self.taken == "both" else "replicated"

    def spread_out(self, c: ParallelConfig) -> Spread:
        return "features" if self.given == "both" else "replicated"

    def output(self, spread: Spread) -> tuple[Layout, Layout]:
        summed, rest = super().output(spread)
        return summed, replace(rest, partial_gradient=frozenset({self.k_axis})) if self.shared else rest

    def shares_of_output(self) -> tuple[tuple[bool, Fraction], ...]:
        """The shares of its output features that are cut and that are whole on every rank."""
        whole = Fraction(sum(self.sections[number] for number in self.kept), self.n)
        return ((False, 1 - whole), (True, whole)) if self.kept else ((False, Fraction(1)),)

    def kept_output(self) -> tuple[tuple[Layout, Layout], tuple[Layout, Layout]]:
        """Of the sections that are whole on every rank: reduced over K's axis, and gathered over N's."""
        alone = replace(self, given="whole", shared=True, kept=())
        return alone.output("replicated"), alone.leaving

    @property
    def leaving(self) -> tuple[Layout, Layout]:
        """From features that an axis cuts to whole features."""
        rest, whole = _whole(
            self.n_axis
        )  # without a reduction each rank takes its part of the gradient, which moves nothing
        if not self.shared:
            return rest, whole
        both = frozenset({self.k_axis, self.n_axis})
        return replace(rest, partial_gradient=frozenset({self.k_axis})), replace(whole, partial_gradient=both)

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (_whole(self.side)[1] if self.enters else self.input(self.spread_in(c))[0],)

    def gives(self, c: ParallelConfig) -> Layout:
        return self.leaving[1] if self.leaves else self.output(self.spread_out(c))[1]

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        rest, used = self.weight(cut=True)
        for call in self.calls:
            x, y = call.all_in(c) * self.k, call.all_out(c) * self.held(c)
            if self.joins is None:
                ends = [_whole(self.k_axis)[::-1]] if self.enters else []
                for source, target in [*ends, self.input(self.spread_in(c))]:
                    yield Transfer("F", source, target, x)
                    yield Transfer("I", target.gradient, source.gradient, x, when=call.back)
            # The bias is added between the reduction and the gather.
            product = call.live and (call.gradient or "weight" in self.trained)
            for whole, exact in self.shares_of_output():
                share = exact if isinstance(c.samples, Fraction) else float(exact)
                for source, target in self.kept_output() if whole else (self.output(self.spread_out(c)),):
                    yield from there_and_back(source, target, y * share, back_when=product)
            if self.leaves:
                yield from there_and_back(*self.leaving, y, back_when=product or (call.live and "bias" in self.trained))
            for each in weight_transfers(rest, used, self.k * self.held(c) * self.kernel_numel, self._own(c)):
                wanted = {"F": True, "I": call.gradient, "W": call.live and "weight" in self.trained}[each.phase]
                yield replace(each, when=each.when & wanted)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        for each in super().parameters(self._own(c)):
            if not each.name.endswith(".bias"):
                yield replace(each, trained="weight" in self.trained)
                continue
            across, trained = other(self.bias_axis), "bias" in self.trained
            if self.kept:
                layout, partial_sum = Layout.of(first=None), (*ROWS, *PLANE)
                yield replace(each, layout=layout, partial=partial_sum, arranged=lambda: None, trained=trained)
            elif self.given == "both":
                layout, arranged = Layout.of(first=(self.bias_axis, across)), partial(self._bias_arrangement, c)
                yield replace(each, layout=layout, partial=ROWS, arranged=arranged, trained=trained)
            else:
                alike = () if self.shared else (across,)
                yield replace(each, partial=(*ROWS, across), alike=alike, trained=trained)

    def _bias_arrangement(self, c: ParallelConfig) -> Arrangement | None:
        if self.n_axis == "x":  # in the axis order of the grid
            return self.arrangement(c)
        return exchanged(int(self.held(c)), int(c.size(self.n_axis)), int(c.size(self.k_axis)), self.arrangement(c))

    def rows_in(self, c: ParallelConfig) -> Any:
        return sum(call.all_in(c) for call in self.calls) / (c.data * c.z)

    def rows_out(self, c: ParallelConfig) -> Any:
        return sum(call.all_out(c) for call in self.calls) / (c.data * c.z)

    def products(self, c: ParallelConfig) -> Iterator[Product]:
        for call in self.calls:
            k, n = self.k / c.size(self.k_axis), self.held(c) / c.size(self.n_axis)
            yield Product(call.all_out(c) / (c.data * c.z), k, n, self.kernel_numel)

    def touched(self, c: ParallelConfig) -> Touched:
        rows = sum(call.all_out(c) for call in self.calls)
        nbytes = rows / (c.data * c.z) * self.n / c.size(self.n_axis) * c.item
        return Touched(5 * nbytes, 3 * nbytes)

    def saved(self, c: ParallelConfig) -> Any:
        rows = 0 if self.joins else sum(call.all_in(c) for call in self.calls)
        return rows / (c.data * c.z) * self.k / c.size(self.k_axis) * c.item

    def flops(self, sequence: int) -> float:
        return 2.0 * self.k * self.n * self.kernel_numel * sum(call.rows_out for call in self.calls)

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        label = "features of a linear over x and y"
        yield from divides(label, "input features", self.k, c, self.k_axis)
        if self.given == "both":
            yield from divides(label, "output features", self.n, c, "x", "y")
        elif not self.padded:
            yield from divides(label, "output features", self.n, c, self.n_axis)


@dataclass(frozen=True, kw_only=True)
class TracedEmbeddingSpec(EmbeddingSpec):
    """Vocabulary over y, features over x. `scale` multiplies the looked-up vectors; the row `padding` is not trained."""

    calls: tuple[Call, ...]
    given: FeatureRest
    scale: float = 1.0
    padding: int | None = None
    shares: str | None = None  # the layer whose weight it shares
    trained: tuple[str, ...] = ("weight",)

    @property
    def leaves(self) -> bool:
        return self.given == "whole"

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (Layout.of(rows=ROWS),)

    def gives(self, c: ParallelConfig) -> Layout:
        return _whole("x")[1] if self.leaves else self.rests(c)

    def rests(self, c: ParallelConfig) -> Layout:
        return Layout.of(rows=ROWS, features=("x", "y")) if self.given == "both" else stream("x", False)

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        rest, used = self._weight(cut=True)
        elements = self.held(c) * self.features
        for call in self.calls:
            rows = call.all_out(c) * self.features
            live = bool(self.trained) and call.live
            yield from there_and_back(self.found, self.rests(c), rows, back="W", back_when=live)
            if self.leaves:
                yield Transfer("F", *_whole("x"), rows)
            yield Transfer("F", rest, used, elements, when=c.weights_cut, of_weight=True)
            if live:
                yield gradient_scatter(rest, used, elements, c.weights_cut)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        for each in super().parameters(c):
            yield replace(each, name=f"{self.shares or self.name}.weight", trained=bool(self.trained))

    def touched(self, c: ParallelConfig) -> Touched:
        nbytes = self._rows(c) * self.features / c.x * c.item
        return Touched(forward=2 * nbytes, weight_grad=3 * nbytes, operators=3)

    def saved(self, c: ParallelConfig) -> Any:
        return 9 * self._rows(c)

    def _rows(self, c: ParallelConfig) -> Any:
        """Rows on one rank."""
        return sum(call.all_out(c) for call in self.calls) / (c.data * c.z)

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from divides("hidden size over x", "features", self.features, c, "x")


@dataclass(frozen=True, kw_only=True)
class TracedNormSpec(LayerSpec):
    """LayerNorm (centred) or RMSNorm of features cut over these axes. The weight is the parameter plus `offset`."""

    axes: tuple[Side, ...]
    features: int
    centred: bool
    weight: bool
    bias: bool
    eps: float
    calls: tuple[Call, ...]
    offset: float = 0.0
    differing: Axes = ()  # axes whose ranks have the same features, and each a partial gradient of them
    trained: tuple[str, ...] = ("weight", "bias")

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (self.gives(c),)

    def gives(self, c: ParallelConfig) -> Layout:
        return Layout.of(rows=ROWS, features=self.axes)

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        whole, axes = Layout.of(parts=None, rows=ROWS), tuple(sorted(self.axes))
        summed = Layout(whole.dims, partial=frozenset(axes))
        for call in self.calls:
            rows = call.all_in(c)
            if self.centred:  # each part's mean and spread, all-gathered; in the backward two sums per row
                yield Transfer("F", whole.with_dims(parts=axes), whole, 2 * c.size(*axes) * rows, "statistic")
            else:
                yield Transfer("F", summed, whole, rows, "statistic")
            yield Transfer("I", summed, whole, (2 if self.centred else 1) * rows, "statistic", when=call.back)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        across = other(self.axes[0])
        both = across in self.axes
        alike = () if both or across in self.differing else (across,)
        partial_sum = ROWS if both else (*ROWS, across)
        layout = Layout.of(first=self.axes)

        def arranged() -> Arrangement | None:
            return exchanged(self.features, int(c.y), int(c.x)) if self.axes == ("y", "x") else None

        for kind, there in (("weight", self.weight), ("bias", self.bias)):
            if there:
                name, trained = f"{self.name}.{kind}", kind in self.trained
                yield Parameter(name, (self.features,), layout, partial_sum, True, arranged, alike, trained)

    def touched(self, c: ParallelConfig) -> Touched:
        nbytes = self.numbers(c) * choose(c.size(*self.axes) > 1, 6 * c.statistic, 2 * c.item)
        return Touched(nbytes, 2 * nbytes, operators=4)

    def saved(self, c: ParallelConfig) -> Any:
        return self.numbers(c) * c.item

    def numbers(self, c: ParallelConfig) -> Any:
        """Elements of its input on a rank."""
        return sum(call.all_in(c) for call in self.calls) / (c.data * c.z) * self.features / c.size(*self.axes)

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from divides("features of a norm", "features", self.features, c, *self.axes)


@dataclass(frozen=True, kw_only=True)
class TracedLossSpec(LayerSpec):
    """A cross-entropy inside the model, of logits with classes over `axis`, or of whole logits.

    Its sums have `nbytes` per element; None: those of the model's dtype, and at least float32.
    """

    axis: Side | None
    rows: Any  # per sample
    nbytes: int | None
    smoothing: float = 0.0

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        nbytes = self.nbytes or c.statistic
        size = Fraction(nbytes, c.item) if isinstance(c.samples, Fraction) else nbytes / c.item
        if self.axis is not None:
            summed = Layout.of(rows=ROWS, partial=self.axis)
            elements = c.samples * self.rows * size
            yield Transfer("F", summed, Layout.of(rows=ROWS), elements)  # the maximum logit
            yield Transfer("F", summed, Layout.of(rows=ROWS), (3 if self.smoothing else 2) * elements)
        yield Transfer("F", Layout.of(partial=ROWS), Layout.of(), 2 * size)

    def touched(self, c: ParallelConfig) -> None:
        return None

    def saved(self, c: ParallelConfig) -> Any:
        return 0.0
