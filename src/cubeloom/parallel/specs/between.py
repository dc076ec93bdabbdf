"""What a traced model computes and keeps between its layers, for the planner: nobody replaces it, so that it has no layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.layout import Axes
from cubeloom.parallel.specs.spec import LayerSpec, Touched

Parts = tuple[tuple[float, Axes], ...]
"""So much of a sample of the whole model, and the axes that cut it."""


@dataclass(frozen=True, kw_only=True)
class BetweenSpec(LayerSpec):
    """Products such as attention's; and numbers that are kept for the backward, `wide` ones with four bytes at least."""

    multiplied: Parts  # FLOPs of a forward
    kept: Parts
    wide: Parts = ()

    def flops_here(self, c: ParallelConfig) -> Any:
        """Of a forward of one rank."""
        return c.samples_of * _cut(self.multiplied, c)

    def touched(self, c: ParallelConfig) -> Touched:
        """Each number is written once and read once; a gradient reads what was kept, too."""
        nbytes = self.saved(c)
        return Touched(2 * nbytes, 3 * nbytes, operators=8)

    def saved(self, c: ParallelConfig) -> Any:
        return c.samples_of * (_cut(self.kept, c) * c.item + _cut(self.wide, c) * c.statistic)

    def flops(self, sequence: int) -> float:
        return sum(flops for flops, _ in self.multiplied)


def _cut(parts: Parts, c: ParallelConfig) -> Any:
    return sum((numbers / c.size(*axes) for numbers, axes in parts), start=0.0)
