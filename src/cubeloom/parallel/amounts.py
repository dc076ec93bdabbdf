"""Amounts of communication: bytes by axis, and what rings move."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from cubeloom.base.grid import Grid
from cubeloom.parallel.cut import GradientDtype

Volume = dict[str, Fraction]


@dataclass(frozen=True)
class Words:
    """Bytes of one number: of activations and weights, of weight gradients, and of sums over features (at least float32)."""

    item: int
    gradients: GradientDtype = "float32"

    @property
    def statistic(self) -> int:
        return max(self.item, 4)

    @property
    def gradient(self) -> int:
        """As gradients of weights are accumulated and reduced."""
        return max(self.item, 4) if self.gradients == "float32" else self.item


@dataclass(frozen=True)
class Summed:
    """Numbers that ranks sum: how many a rank has, and over which axes; of a parameter's gradient, in so many rows."""

    count: Fraction
    axes: tuple[str, ...]
    rows: Fraction | int = 1


def ring(parts: int) -> Fraction:
    """What a rank receives of a tensor that a ring gathers or scatters."""
    return Fraction(parts - 1, parts)


def sum_volume(part: Summed, grid: Grid, words: Words, workers: int = 1) -> Volume:
    """An all-reduce over the axes and, in a pipeline, over the workers that hold the stage, as one group."""
    label, ranks = _group(part, grid, workers)
    return {label: 2 * ring(ranks) * part.count * words.item} if ranks > 1 else {}


def gradient_volume(part: Summed, grid: Grid, words: Words, workers: int = 1, zero: bool = False) -> Volume:
    """The same of a gradient. With ZeRO-1 it is scattered, and updated weights are gathered in its place."""
    label, ranks = _group(part, grid, workers)
    back = words.item if zero and part.rows % ranks == 0 else words.gradient
    return {label: ring(ranks) * part.count * (words.gradient + back)} if ranks > 1 else {}


def _group(part: Summed, grid: Grid, workers: int) -> tuple[str, int]:
    """The axes as the ledger names them, and how many ranks they have."""
    wide = [axis for axis in part.axes if grid.size(axis) > 1]
    return "+".join((["pipe"] if workers > 1 else []) + wide), workers * prod(grid.size(axis) for axis in wide)


def add(*volumes: Volume) -> Volume:
    total: dict[str, Fraction] = defaultdict(Fraction)
    for volume in volumes:
        for axis, size in volume.items():
            total[axis] += size
    return {axis: size for axis, size in total.items() if size}
