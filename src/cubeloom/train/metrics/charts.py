"""The curves of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from cubeloom.train.metrics.chart import Chart, Series, Unit
from cubeloom.train.metrics.log import Log
from cubeloom.train.metrics.record import Record
from cubeloom.train.metrics.thin import MOST, Point, averaged, thinned

_PARTS = ("computing", "exposed communication", "bubble")
_MOST_MARKS = 200


def charts(log: Log, most: int = MOST) -> list[Chart]:
    """The curves that have a point, each of at most so many points."""
    records, marks = log.records, _marks(log)
    found = [
        Chart("loss", "Loss", _losses(records, most), marks=marks),
        *_one(records, most, "gradient-norm", "Gradient norm", lambda r: r.gradient_norm, marks=marks),
        *_one(records, most, "learning-rate", "Learning rate", lambda r: r.learning_rate),
        *_one(records, most, "tokens", "Tokens per second", lambda r: r.tokens_per_s, "count"),
        *_one(records, most, "mfu", "Model FLOPs utilisation", lambda r: r.mfu, "share"),
        Chart("time", "Where the time of a step goes", _times(records, most), "seconds"),
        *_one(records, most, "memory", "Peak memory of a rank", lambda r: r.memory_bytes, "bytes"),
    ]
    own = dict.fromkeys(name for record in records for name in record.own)
    for number, name in enumerate(own):
        found += _one(records, most, f"own-{number}", name, lambda r, name=name: r.own.get(name))  # type: ignore[misc]
    return [chart for chart in found if any(series.points for series in chart.series)]


def _losses(records: tuple[Record, ...], most: int) -> list[Series]:
    series = [Series("training", thinned([(r.step, r.loss) for r in records], most))]
    judged = [(r.step, r.validation) for r in records if r.validation is not None]
    if judged:
        series.append(Series("validation", thinned(judged, most), "dots"))
    return series


def _one(
    records: tuple[Record, ...],
    most: int,
    name: str,
    title: str,
    value: Callable[[Record], float | None],
    unit: Unit = "",
    marks: Sequence[tuple[int, str]] = (),
) -> Iterator[Chart]:
    points: list[Point] = []
    for record in records:
        found = value(record)
        if found is not None:
            points.append((record.step, found))
    if points:
        yield Chart(name, title, [Series(title.lower(), thinned(points, most))], unit, marks)


def _times(records: tuple[Record, ...], most: int) -> list[Series]:
    """The parts of a step, stacked, where they were measured, under the time of the whole step."""
    columns = []
    for record in records:
        parts = (record.computing_s, record.exposed_s, record.bubble_s)
        if any(part is not None for part in parts) and math.isfinite(record.seconds):
            columns.append((record.step, [*(part or 0.0 for part in parts), record.seconds]))
    if not columns:
        whole = thinned([(record.step, record.seconds) for record in records], most)
        return [Series("whole step", whole)]
    means = averaged(columns, most)
    series = [
        Series(name, [(step, values[place]) for step, values in means], "area") for place, name in enumerate(_PARTS)
    ]
    return [*series, Series("whole step", [(step, values[-1]) for step, values in means])]


def _marks(log: Log) -> list[tuple[int, str]]:
    """Skipped updates, and restarts of the run."""
    found = [(record.step, f"update skipped: {record.skipped}") for record in log.records if record.skipped is not None]
    again = ("resume", "early stop")
    found += [(event.step, event.name) for event in log.events if event.step is not None and event.name in again]
    return sorted(found)[-_MOST_MARKS:]
