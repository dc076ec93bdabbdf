"""Timelines drawn with characters, and a table that compares schedules."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from cubeloom.pipeline import Kind, Timeline
from cubeloom.pipeline.action import COMPUTE
from cubeloom.pipeline.drawing.palette import colour, ink
from cubeloom.pipeline.simulator import Span

_FILL = {Kind.FORWARD: "░", Kind.BACKWARD: "▓", Kind.INPUT_GRAD: "▒", Kind.WEIGHT_GRAD: "█"}
_IDLE = "·"


def drawing(timelines: Sequence[Timeline], width: int = 120, colours: bool = True) -> Text:
    """One line per worker, all schedules on one scale. Without colours, letters and shades show the kind."""
    longest = max(timeline.makespan for timeline in timelines)
    margin = 4 + len(str(max(len(timeline.spans) for timeline in timelines)))
    scale = _scale(longest, width - margin)
    text = Text(no_wrap=True, overflow="crop")
    for timeline in timelines:
        if len(timelines) > 1:
            text.append(f"{timeline.schedule.name}\n", style="bold")
        for worker, row in enumerate(timeline.spans):
            text.append(f"{f'P{worker}':>{margin - 2}}  ", style="dim")
            text.append_text(_row(row, timeline.makespan, scale, colours))
            text.append("\n")
    return text


def _scale(longest: float, columns: int) -> float:
    """Characters per unit of time: an integer if one fits, so that equal actions look equal."""
    fitting = columns / longest if longest else 1.0
    return float(min(int(fitting), 4)) if fitting >= 1 else fitting


def _row(row: Sequence[Span], makespan: float, scale: float, colours: bool) -> Text:
    text = Text()
    at = 0
    for span in row:
        if span.action.kind not in COMPUTE:
            continue
        start, end = round(span.start * scale), round(span.end * scale)
        text.append(_IDLE * (start - at), style="dim")
        text.append_text(_block(span, end - max(start, at), colours))
        at = max(at, end)
    text.append(_IDLE * (round(makespan * scale) - at), style="dim")
    return text


def _block(span: Span, width: int, colours: bool) -> Text:
    """The micro-batch's number, with the kind before it if there is room."""
    action = span.action
    labels = [f"{action.kind}{action.microbatch}", str(action.microbatch), ""]
    if colours:
        label = next(label for label in labels[1:] if len(label) <= width)
        return Text(f"{label:^{width}}" if width else "", style=f"{ink(action)} on {colour(action)}")
    label = next(label for label in labels if len(label) <= width)
    return Text(label + _FILL[action.kind] * (width - len(label)))


def summary(timelines: Sequence[Timeline]) -> Table:
    """The table that compares schedules."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("schedule")
    for name in ("makespan", "ideal", "bubble", "peak activations", "weights"):
        table.add_column(name, justify="right")
    for timeline in timelines:
        low, high = min(timeline.peak_activations), max(timeline.peak_activations)
        table.add_row(
            timeline.schedule.name,
            f"{timeline.makespan:g}",
            f"{timeline.ideal:g}",
            f"{bubble(timeline):.1%}",
            f"{low:g}" if low == high else f"{low:g} to {high:g}",
            f"{timeline.weight_copies:g}",
        )
    return table


def bubble(timeline: Timeline) -> float:
    """The fraction of all workers' time in which they do not compute."""
    return sum(timeline.bubble_ratio) / len(timeline.bubble_ratio)
