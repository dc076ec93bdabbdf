"""The list of layers of a model whose cut is found: it is traced on each plane, x by y, that a plan could choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

from torch import nn

from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.models import ModelSource, skeleton
from cubeloom.parallel.config import Batch
from cubeloom.parallel.layout import Axes
from cubeloom.parallel.recomputed import blocks_of
from cubeloom.parallel.specs import (
    BetweenSpec,
    LayerSpec,
    TracedEmbeddingSpec,
    TracedLinearSpec,
    TracedLossSpec,
    WholeSpec,
)
from cubeloom.parallel.traced import Traced as TracedModel
from cubeloom.parallel.traced import Tracing
from cubeloom.pipeline.runtime.model_pieces import ModelPieces
from cubeloom.pipeline.runtime.partition import belongs, counted_costs, partitions
from cubeloom.pipeline.volume import RankOutput
from cubeloom.plan.model.found import Traced
from cubeloom.plan.model.model import Piece, PlaneOutput
from cubeloom.plan.model.shortened import Shortened, shortened

PLANE: Axes = ("x", "y")
_CUTTING: tuple[Axes, ...] = ((), ("x",), ("y",), PLANE)
_DIGITS = 9  # of a share


class ModelTracer:
    """Traces a model on planes, without most of its blocks that are like others."""

    def __init__(self, source: ModelSource, sequence: int) -> None:
        """Raises UserError where the model cannot be traced."""
        self._tokens = source.positions is not None
        self._batch = Batch(2, sequence if self._tokens else 1)
        whole = skeleton(source)
        cut = source.cut(whole)
        assert isinstance(cut, Tracing)
        example = cache(cut.example)  # the same on every plane
        try:
            self._short = shortened(whole)
            self._cut = Tracing(example)
            self._alone = self._plane(1, 1)
            self._alone.check_blocks(self._short)
        except UserError:  # its blocks depend on one another
            self._short = Shortened(whole, {})
            self._cut = Tracing(example)
            self._alone = self._plane(1, 1)
        row = self._alone.row(self._short)
        stages = partitions(self._alone.costs(row), range(1, len(row) + 1))
        cuts = {count: tuple(each.stop for each in ends) for count, ends in stages.items()}
        self.traced = Traced(self._batch.sequence, tuple(row), cuts)

    def pieces(self, x: int, y: int) -> tuple[Piece, ...]:
        found = self._alone if (x, y) == (1, 1) else self._plane(x, y)
        return tuple(found.pieces(self._alone, self._tokens))

    def _plane(self, x: int, y: int) -> _Plane:
        return _Plane.of(self._short, self._cut, x, y, self._batch)


@dataclass(frozen=True)
class _Plane:
    """The shortened model, as it was traced for a plane."""

    x: int
    y: int
    traced: TracedModel
    specs: tuple[LayerSpec, ...]
    modules: Sequence[tuple[str, ...]]
    outputs: Sequence[tuple[RankOutput, ...]]
    blocks: frozenset[str]

    @classmethod
    def of(cls, short: Shortened, cut: Tracing, x: int, y: int, batch: Batch) -> _Plane:
        grid = Grid(x=x, y=y)
        traced = cut.traced(short.model, grid, batch)
        specs = tuple(map(_plain, traced.specs))
        modules, outputs = _pieces(short.model, cut, grid, batch, specs)
        return cls(x, y, traced, specs, modules, outputs, frozenset(blocks_of(short.model, specs)))

    def check_blocks(self, short: Shortened) -> None:
        """That each block that stands for others is a piece of its own."""
        alone = {names[0] for names in self.modules if len(names) == 1}
        if len(short.blocks) > len(set(short.blocks.values())) and not set(short.blocks.values()) <= alone:
            raise UserError("blocks that stand for others are no pieces of their own")

    def row(self, short: Shortened) -> list[int]:
        """The pieces of the whole model, each as the place of the piece that it is like."""
        numbers = {names[0]: place for place, names in enumerate(self.modules) if len(names) == 1}
        like = {kept: [block for block, of in short.blocks.items() if of == kept] for kept in short.blocks.values()}
        found: list[int] = []
        done: set[str] = set()
        for place, names in enumerate(self.modules):
            block = names[0] if len(names) == 1 else ""
            if block not in like:
                found.append(place)
            elif block not in done:  # all blocks of this row, in their own order
                of_row = [each for each in short.blocks if each.rpartition(".")[0] == block.rpartition(".")[0]]
                found += [numbers[short.blocks[each]] for each in of_row]
                done |= {short.blocks[each] for each in of_row}
        return found

    def costs(self, row: Sequence[int]) -> list[float]:
        each = counted_costs(self.modules, self.specs)
        return [each[place] for place in row]

    def pieces(self, alone: _Plane, tokens: bool) -> Iterator[Piece]:
        """`alone` is the model on a plane of one rank: what is a part of what that has, is cut."""
        blocks = [place for place in range(len(self.modules)) if 0 < place < len(self.modules) - 1] or [0]
        for place, names in enumerate(self.modules):
            own = [spec for spec in self.specs if belongs(spec.name, names)]
            multiplied = self._multiplied(alone, len(blocks)) if place in blocks else []
            of_whole = [(spec.flops(1), ()) for spec in own if isinstance(spec, WholeSpec) and spec.flops(1)]
            kept, wide = self._kept(own)
            between = BetweenSpec(
                name=f"{names[0].rstrip('.')}.between",
                multiplied=(*multiplied, *of_whole),
                kept=kept,
                wide=wide,
            )
            layers = tuple(_without_place(spec, names) for spec in (*map(_without_flops, own), between))
            losses = sum(isinstance(spec, TracedLossSpec) for spec in own)
            outputs = tuple(self._outputs(alone, place))
            yield Piece(layers=layers, outputs=outputs, tokens=tokens, losses=losses, block=set(names) <= self.blocks)

    def _multiplied(self, alone: _Plane, blocks: int) -> list[tuple[float, Axes]]:
        """Products between layers, of a block. Of those that are not cut evenly a part counts as whole."""
        whole, own = (flops / blocks for flops in self.traced.flops_between)
        if not whole:
            return []
        for axes in _CUTTING:
            if abs(own * self._parts(axes) - whole) <= 1e-9 * whole:
                return [(whole, axes)]
        share = round((1 - own / whole) / (1 - 1 / self._parts(PLANE)), _DIGITS)
        return [(whole * share, PLANE), (whole * (1 - share), ())]

    def _kept(self, own: Sequence[LayerSpec]) -> tuple[tuple[tuple[float, Axes], ...], tuple[tuple[float, Axes], ...]]:
        """Between layers: about what linears give, once; and of a loss what is as large as its logits."""
        kept: dict[Axes, float] = {}
        wide: dict[Axes, float] = {}
        linears = {spec.name: spec for spec in self.specs if isinstance(spec, TracedLinearSpec)}
        for spec in own:
            if isinstance(spec, TracedLinearSpec):
                kept[_cutting(spec)] = kept.get(_cutting(spec), 0.0) + _given(spec)
            head = linears.get(spec.name.rpartition(".")[0]) if isinstance(spec, TracedLossSpec) else None
            if head is not None:
                wide[_cutting(head)] = wide.get(_cutting(head), 0.0) + _given(head)
        return tuple(sorted((each, axes) for axes, each in kept.items())), tuple(
            sorted((each, axes) for axes, each in wide.items())
        )

    def _outputs(self, alone: _Plane, place: int) -> Iterator[PlaneOutput]:
        for here, there in zip(self.outputs[place], alone.outputs[place], strict=True):
            cut = next((axes for axes in _CUTTING if here.numbers * self._parts(axes) == there.numbers), None)
            numbers = float(here.numbers if cut is None else there.numbers)
            yield PlaneOutput(numbers, here.of_samples, cut or ())

    def _parts(self, axes: Axes) -> int:
        return (self.x if "x" in axes else 1) * (self.y if "y" in axes else 1)


def _pieces(
    model: nn.Module, cut: Tracing, grid: Grid, batch: Batch, specs: Sequence[LayerSpec]
) -> tuple[Sequence[tuple[str, ...]], Sequence[tuple[RankOutput, ...]]]:
    found = ModelPieces.of(model, cut, grid, batch, specs)
    return found.modules, found.outputs  # type: ignore[return-value]


def _cutting(spec: TracedLinearSpec) -> Axes:
    return {"both": PLANE, "whole": ()}.get(spec.given, (spec.n_axis,))


def _given(spec: TracedLinearSpec) -> float:
    return float(spec.n * sum(call.rows_out for call in spec.calls))


def _plain(spec: LayerSpec) -> LayerSpec:
    """With numbers that numpy computes with."""
    if isinstance(spec, TracedLossSpec):
        return replace(spec, rows=_number(spec.rows))
    calls = getattr(spec, "calls", None)
    if calls is None:
        return spec
    changed: Any = [replace(call, rows_in=_number(call.rows_in), rows_out=_number(call.rows_out)) for call in calls]
    return replace(spec, calls=tuple(changed))  # type: ignore[call-arg]


def _number(value: Any) -> Any:
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return value


def _without_flops(spec: LayerSpec) -> LayerSpec:
    """Those of whole modules are counted with what is between layers."""
    return replace(spec, forward_flops=0.0, why="") if isinstance(spec, WholeSpec) else spec


def _without_place(spec: LayerSpec, names: tuple[str, ...]) -> LayerSpec:
    """With a name that does not say which of several equal blocks it is of."""
    if len(names) > 1:
        return spec
    prefix = f"{names[0]}."
    changes: dict[str, Any] = {"name": spec.name.removeprefix(prefix)}
    if isinstance(spec, TracedLinearSpec) and spec.joins is not None:
        changes["joins"] = spec.joins.removeprefix(prefix)
    if isinstance(spec, TracedLinearSpec | TracedEmbeddingSpec) and (spec.shares or "").startswith(prefix):
        changes["shares"] = str(spec.shares).removeprefix(prefix)
    return replace(spec, **changes)
