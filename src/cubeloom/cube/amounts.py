"""Amounts of communication: bytes by axis, and what rings move."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from cubeloom.grid import Grid

Volume = dict[str, Fraction]


@dataclass(frozen=True)
class Words:
    """Bytes of one number: of activations, weights and gradients, and of sums over features (at least float32)."""

    item: int

    @property
    def statistic(self) -> int:
        return max(self.item, 4)


@dataclass(frozen=True)
class Summed:
    """Numbers that ranks sum: how many a rank has, and over which axes."""

    count: Fraction
    axes: tuple[str, ...]


def ring(parts: int) -> Fraction:
    """What a rank receives of a tensor that a ring gathers or scatters."""
    return Fraction(parts - 1, parts)


def sum_volume(part: Summed, grid: Grid, words: Words, workers: int = 1) -> Volume:
    """An all-reduce over the axes and, in a pipeline, over the workers that hold the stage, as one group."""
    wide = [axis for axis in part.axes if grid.size(axis) > 1]
    ranks = workers * prod(grid.size(axis) for axis in wide)
    label = "+".join((["pipe"] if workers > 1 else []) + wide)
    return {label: 2 * ring(ranks) * part.count * words.item} if ranks > 1 else {}


def add(*volumes: Volume) -> Volume:
    total: dict[str, Fraction] = defaultdict(Fraction)
    for volume in volumes:
        for axis, size in volume.items():
            total[axis] += size
    return {axis: size for axis, size in total.items() if size}
