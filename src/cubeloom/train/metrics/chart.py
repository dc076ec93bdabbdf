"""Curves over the steps of a run, as values that pages draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from cubeloom.train.metrics.thin import Point

Unit = Literal["", "seconds", "bytes", "share", "count"]


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    shape: Literal["line", "dots", "area"] = "line"  # areas are stacked on those before them, at the same steps


@dataclass(frozen=True)
class Chart:
    name: str  # unique in a page
    title: str
    series: Sequence[Series]
    unit: Unit = ""
    marks: Sequence[tuple[int, str]] = ()  # steps with a vertical line, and its label

    def as_json(self) -> dict[str, Any]:
        """JSON has no NaN: None is a number that is not finite."""
        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "marks": [{"step": step, "text": text} for step, text in self.marks],
            "series": [
                {
                    "name": each.name,
                    "shape": each.shape,
                    "steps": [step for step, _ in each.points],
                    "values": [value if isfinite(value) else None for _, value in each.points],
                }
                for each in self.series
            ],
        }
