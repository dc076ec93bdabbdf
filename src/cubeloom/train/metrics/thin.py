"""Reduces long curves to few points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

Point = tuple[int, float]  # step, value
MOST = 1000
T = TypeVar("T")


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """At most `most` of the points, with every spike: of each group of steps the lowest, the highest and, if there is
    one, a NaN. The first and the last point are always kept.
    """
    if len(points) <= most:
        return list(points)
    kept = [points[0]]
    for run in _runs(points[1:-1], (most - 2) // 3):
        numbers = [point for point in run if math.isfinite(point[1])]
        chosen = {min(numbers, key=_value), max(numbers, key=_value)} if numbers else set()
        chosen.update([point for point in run if not math.isfinite(point[1])][:1])
        kept += sorted(chosen, key=lambda point: point[0])
    return [*kept, points[-1]]


def averaged(columns: Sequence[tuple[int, Sequence[float]]], most: int = MOST) -> list[tuple[int, list[float]]]:
    """Stacked curves, as means over groups of steps, so that they still add up."""
    runs = _runs(columns, most) if len(columns) > most else ([column] for column in columns)
    return [
        (run[len(run) // 2][0], [sum(values) / len(run) for values in zip(*(column for _, column in run), strict=True)])
        for run in runs
    ]


def _runs(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """Groups of nearly equal size, none empty."""
    for place in range(count):
        run = items[place * len(items) // count : (place + 1) * len(items) // count]
        if run:
            yield run


def _value(point: Point) -> float:
    return point[1]
