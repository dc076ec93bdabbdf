"""The result of a reproduction: published figures beside ours, where the time goes, and notes for reading them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """A published figure and its source: `abstract`, `figure` (read off by others), `code`, `recalled`."""

    name: str
    value: float
    source: str


@dataclass(frozen=True)
class Row:
    point: Point
    ours: float
    calibrated: bool = False  # whether this figure was used to set a constant of the model

    @property
    def difference(self) -> float:
        """Ours over the published figure, minus one; if that is zero, the absolute difference."""
        return self.ours / self.point.value - 1 if self.point.value else self.ours

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.point.name,
            "published": self.point.value,
            "ours": self.ours,
            "calibrated": self.calibrated,
            "source": self.point.source,
        }


@dataclass(frozen=True)
class Share:
    """The seconds of one of our runs, by what they are spent on."""

    name: str
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Report:
    paper: str
    title: str
    rows: tuple[Row, ...]
    shares: tuple[Share, ...]
    words: tuple[str, ...]
    plotted: tuple[str, ...]  # names of the rows in the plot, of one unit

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": [row.as_json() for row in self.rows],
            "seconds": {share.name: share.seconds for share in self.shares},
            "words": list(self.words),
        }
