"""A lower bound on what some rank must receive in a matmul: Al Daas, Ballard, Grigori, Kumar, Rouse, SPAA 2022.

The bound is for one matmul whose operands start, and whose result ends, as one copy spread over the ranks, with enough
memory. It does not apply to replicated operands: other passes paid for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import cbrt, sqrt

from cubeloom.base.divisors import divisors


def regime(m: int, k: int, n: int, ranks: int) -> int:
    """The number of dimensions that the best grid cuts: 1, 2 or 3."""
    d1, d2, d3 = sorted((m, k, n), reverse=True)
    if ranks * d2 <= d1:
        return 1
    return 2 if ranks * d3 * d3 <= d1 * d2 else 3


def lower_bound(m: int, k: int, n: int, ranks: int) -> float:
    """Elements that some rank receives in `[m,k]·[k,n]` with any algorithm: those it must access minus those it has."""
    d1, d2, d3 = sorted((m, k, n), reverse=True)
    match regime(m, k, n, ranks):
        case 1:
            touched = (d1 * d2 + d1 * d3) / ranks + d2 * d3
        case 2:
            touched = 2 * sqrt(d1 * d2 * d3 * d3 / ranks) + d1 * d2 / ranks
        case _:
            touched = 3 * cbrt(d1 * d2 * d3 / ranks) ** 2
    return touched - (m * k + k * n + m * n) / ranks


def moved_words(m: int, k: int, n: int, grid: tuple[int, int, int]) -> Fraction:
    """x + w + y: elements that each rank receives in one matmul on the grid (gm, gk, gn) with sharded operands."""
    gm, gk, gn = grid
    operands = ((m * k, gn), (k * n, gm), (m * n, gk))
    return sum((Fraction(size * (missing - 1), gm * gk * gn) for size, missing in operands), Fraction(0))


def matmul_grids(ranks: int) -> Iterator[tuple[int, int, int]]:
    """Every (gm, gk, gn) of this many ranks."""
    for gm in divisors(ranks):
        for gk in divisors(ranks // gm):
            yield gm, gk, ranks // gm // gk


def best_grid(m: int, k: int, n: int, ranks: int) -> tuple[int, int, int]:
    """The grid on which one matmul moves least; of equals the first."""
    return min(matmul_grids(ranks), key=lambda grid: moved_words(m, k, n, grid))
