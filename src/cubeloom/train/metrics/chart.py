"""Curves over the steps of a run, as SVG. The page's script shows values under the pointer, from the same points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any, Literal

from cubeloom.train.metrics.thin import Point

LEFT, TOP, WIDTH, HEIGHT = 62, 26, 480, 150
_RIGHT, _BOTTOM = 14, 26
Place = Callable[[int, float], tuple[float, float]]  # from a step and a value to a position in the picture


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    colour: str
    shape: Literal["line", "dots", "area"] = "line"  # areas are stacked on those before them, at the same steps


@dataclass(frozen=True)
class Chart:
    name: str  # the element's id in the page
    title: str
    series: Sequence[Series]
    show: Callable[[float], str]  # formats a value
    marks: Sequence[tuple[int, str]] = ()  # steps with a vertical line, and its label

    def as_json(self) -> dict[str, Any]:
        """For the script: None is a NaN."""
        return {
            "name": self.name,
            "first": self._range[0],
            "last": self._range[1],
            "series": [
                {
                    "name": each.name,
                    "steps": [step for step, _ in each.points],
                    "values": [value if math.isfinite(value) else None for _, value in each.points],
                    "words": [self.show(value) for _, value in each.points],
                }
                for each in self.series
            ],
        }

    @property
    def _range(self) -> tuple[int, int]:
        steps = [step for each in self.series for step, _ in each.points]
        return min(steps), max(steps)

    def svg(self) -> str:
        """Raises ValueError if there is no point."""
        first, last = self._range
        low, high = self._values()
        wide = WIDTH / ((last - first) or 1)

        def at(step: int, value: float) -> tuple[float, float]:
            return LEFT + (step - first) * wide, TOP + HEIGHT * (high - value) / (high - low)

        parts = [
            *self._grid(first, last, low, high, at),
            *self._marks(at),
            *self._areas(at),
        ]
        for each in self.series:
            if each.shape != "area":
                parts += _line(each, at) if each.shape == "line" else _dots(each, at)
        parts += self._legend()
        box = f"0 0 {LEFT + WIDTH + _RIGHT} {TOP + HEIGHT + _BOTTOM}"
        label = f'role="img" aria-label="{escape(self.title)}"'
        return f'<svg class="chart" id="{self.name}" viewBox="{box}" {label}>{"".join(parts)}</svg>'

    def _values(self) -> tuple[float, float]:
        """The lowest and highest value of the axis."""
        stacks = self._stacks()
        tops = [value for _, edges in stacks for value in edges]
        plain = [value for each in self.series if each.shape != "area" for _, value in each.points]
        found = [value for value in [*tops, *plain] if math.isfinite(value)] or [0.0]
        low, high = min(found), max(found)
        if stacks:
            low = 0.0
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return (0.0 if low >= 0 and low - room < 0 else low - room), high + room

    def _stacks(self) -> list[tuple[int, list[float]]]:
        """For each step the upper edges of the areas."""
        areas = [each for each in self.series if each.shape == "area"]
        if not areas:
            return []
        columns = zip(*([value for _, value in each.points] for each in areas), strict=True)
        return [(step, list(accumulate(c))) for (step, _), c in zip(areas[0].points, columns, strict=True)]

    def _areas(self, at: Place) -> Iterator[str]:
        stacks = self._stacks()
        areas = [each for each in self.series if each.shape == "area"]
        for place, each in enumerate(areas):
            over = [at(step, edges[place]) for step, edges in stacks]
            under = [at(step, edges[place - 1] if place else 0.0) for step, edges in stacks]
            if len(over) == 1:  # a single step has no width
                over, under = (
                    [(LEFT, over[0][1]), (LEFT + WIDTH, over[0][1])],
                    [(LEFT, under[0][1]), (LEFT + WIDTH, under[0][1])],
                )
            yield f'<polygon points="{_text([*over, *reversed(under)])}" fill="{each.colour}"/>'

    def _grid(self, first: int, last: int, low: float, high: float, at: Place) -> Iterator[str]:
        for value in ticks(low, high, 5):
            y = at(first, value)[1]
            yield f'<path d="M{LEFT} {y:.1f}h{WIDTH}" class="rule"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="axis end">{escape(self.show(value))}</text>'
        for value in ticks(first, last, 6):
            if value == int(value):
                x = at(int(value), low)[0]
                yield f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" class="axis middle">{int(value):,}</text>'

    def _marks(self, at: Place) -> Iterator[str]:
        first, last = self._range
        for step, text in self.marks:
            if first <= step <= last:
                title = f"<title>step {step}: {escape(text)}</title>"
                yield f'<path d="M{at(step, 0.0)[0]:.1f} {TOP}v{HEIGHT}" class="mark">{title}</path>'

    def _legend(self) -> Iterator[str]:
        if len(self.series) < 2:
            return
        x = float(LEFT + WIDTH)
        for each in reversed(self.series):  # from the right
            x -= 6.4 * len(each.name)
            yield f'<text x="{x:.1f}" y="17" class="axis">{escape(each.name)}</text>'
            x -= 14
            yield f'<rect x="{x:.1f}" y="8" width="10" height="10" rx="2" fill="{each.colour}"/>'
            x -= 10


def _line(series: Series, at: Place) -> Iterator[str]:
    """Interrupted at a NaN, which has its own mark at the top."""
    run: list[tuple[float, float]] = []
    for step, value in [*series.points, (0, math.nan)]:
        if math.isfinite(value):
            run.append(at(step, value))
        elif run:
            if len(run) == 1:
                yield f'<circle cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="2" fill="{series.colour}"/>'
            else:
                yield f'<polyline points="{_text(run)}" fill="none" stroke="{series.colour}" stroke-width="1.5"/>'
            run = []
    for step, value in series.points:
        if not math.isfinite(value):
            x = at(step, 0.0)[0]
            title = f"<title>step {step}: {series.name} is not a number</title>"
            yield f'<path d="M{x - 4:.1f} {TOP}h8l-4 7z" class="nan">{title}</path>'


def _dots(series: Series, at: Place) -> Iterator[str]:
    for step, value in series.points:
        if math.isfinite(value):
            x, y = at(step, value)
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{series.colour}" stroke="#fff"/>'


def _text(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
