"""The curves of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from cubeloom.base.units import bytes_, count, seconds
from cubeloom.train.metrics.chart import Chart, Series
from cubeloom.train.metrics.log import Log
from cubeloom.train.metrics.record import Record
from cubeloom.train.metrics.thin import Point, averaged, thinned

_BLUE, _ORANGE, _GREEN, _GREY = "#1f6fc4", "#d9660f", "#1a7f37", "#5c6b7a"
_PARTS = (("computing", "#79aee3"), ("exposed communication", "#e59a5c"), ("bubble", "#eec4bd"))
_MOST_MARKS = 200


def charts(log: Log) -> list[Chart]:
    """The curves that have a point."""
    records, marks = log.records, _marks(log)
    found = [
        Chart("loss", "Loss", _losses(records), _short, marks),
        *_one(records, "gradient-norm", "Gradient norm", lambda r: r.gradient_norm, _short, marks),
        *_one(records, "learning-rate", "Learning rate", lambda r: r.learning_rate, _short),
        *_one(records, "tokens", "Tokens per second", lambda r: r.tokens_per_s, count),
        *_one(records, "mfu", "Model FLOPs utilisation", lambda r: r.mfu, "{:.1%}".format),
        Chart("time", "Where the time of a step goes", _times(records), seconds),
        *_one(records, "memory", "Peak memory of a rank", lambda r: r.memory_bytes, bytes_),
    ]
    own = dict.fromkeys(name for record in records for name in record.own)
    for number, name in enumerate(own):
        found += _one(records, f"own-{number}", name, lambda r, name=name: r.own.get(name), _short)  # type: ignore[misc]
    return [chart for chart in found if any(series.points for series in chart.series)]


def _short(value: float) -> str:
    return f"{value:.4g}"


def _losses(records: tuple[Record, ...]) -> list[Series]:
    series = [Series("training", thinned([(r.step, r.loss) for r in records]), _BLUE)]
    judged = [(r.step, r.validation) for r in records if r.validation is not None]
    if judged:
        series.append(Series("validation", thinned(judged), _ORANGE, "dots"))
    return series


def _one(
    records: tuple[Record, ...],
    name: str,
    title: str,
    value: Callable[[Record], float | None],
    show: Callable[[float], str],
    marks: list[tuple[int, str]] | None = None,
) -> Iterator[Chart]:
    points: list[Point] = []
    for record in records:
        found = value(record)
        if found is not None:
            points.append((record.step, found))
    if points:
        yield Chart(name, title, [Series(title.lower(), thinned(points), _GREEN)], show, marks or ())


def _times(records: tuple[Record, ...]) -> list[Series]:
    """The parts of a step, stacked, where they were measured, under the time of the whole step."""
    columns = []
    for record in records:
        parts = (record.computing_s, record.exposed_s, record.bubble_s)
        if any(part is not None for part in parts) and math.isfinite(record.seconds):
            columns.append((record.step, [*(part or 0.0 for part in parts), record.seconds]))
    if not columns:
        whole = thinned([(record.step, record.seconds) for record in records])
        return [Series("whole step", whole, _GREY)]
    means = averaged(columns)
    series = [
        Series(name, [(step, values[place]) for step, values in means], colour, "area")
        for place, (name, colour) in enumerate(_PARTS)
    ]
    return [*series, Series("whole step", [(step, values[-1]) for step, values in means], _GREY)]


def _marks(log: Log) -> list[tuple[int, str]]:
    """Skipped updates, and restarts of the run."""
    found = [(record.step, f"update skipped: {record.skipped}") for record in log.records if record.skipped is not None]
    again = ("resume", "early stop")
    found += [(event.step, event.name) for event in log.events if event.step is not None and event.name in again]
    return sorted(found)[-_MOST_MARKS:]
