"""What a traced model computes and keeps between its layers. Only the planner uses it: no layer is replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.layout import Axes
from cubeloom.parallel.specs.spec import LayerSpec, Touched

Parts = tuple[tuple[float, Axes], ...]
"""Amounts per sample of the whole model, each with the axes that cut it."""


@dataclass(frozen=True, kw_only=True)
class BetweenSpec(LayerSpec):
    """Matmuls such as attention's, and elements kept for the backward. `wide` elements have at least four bytes."""

    multiplied: Parts  # forward FLOPs
    kept: Parts
    wide: Parts = ()

    def flops_here(self, c: ParallelConfig) -> Any:
        """Forward FLOPs of one rank."""
        return c.samples_of * _cut(self.multiplied, c)

    def touched(self, c: ParallelConfig) -> Touched:
        """Each kept element is written once and read once. A gradient also reads what was kept."""
        nbytes = self.saved(c)
        return Touched(2 * nbytes, 3 * nbytes, operators=8)

    def saved(self, c: ParallelConfig) -> Any:
        return c.samples_of * (_cut(self.kept, c) * c.item + _cut(self.wide, c) * c.statistic)

    def flops(self, sequence: int) -> float:
        return sum(flops for flops, _ in self.multiplied)


def _cut(parts: Parts, c: ParallelConfig) -> Any:
    return sum((numbers / c.size(*axes) for numbers, axes in parts), start=0.0)
