"""Timelines as a trace in the Chrome format, which Perfetto (https://ui.perfetto.dev) opens: one process per schedule."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from cubeloom.pipeline import Action, Timeline
from cubeloom.pipeline.dependencies import makes, needs
from cubeloom.pipeline.drawing.palette import NAMES

_UNIT = 1000.0  # a unit of cost is shown as a millisecond; the format counts in microseconds
Event = dict[str, Any]


def to_trace(timelines: Sequence[Timeline]) -> str:
    events = [event for pid, timeline in enumerate(timelines) for event in _events(timeline, pid)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(timeline: Timeline, pid: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": timeline.schedule.name}}
    for worker, row in enumerate(timeline.spans):
        yield {"ph": "M", "pid": pid, "tid": worker, "name": "thread_name", "args": {"name": f"worker {worker}"}}
        for span in row:
            yield {
                "ph": "X",
                "pid": pid,
                "tid": worker,
                "name": str(span.action),
                "cat": NAMES[span.action.kind],
                "ts": span.start * _UNIT,
                "dur": (span.end - span.start) * _UNIT,
                "args": {field: value for field, value in span.action._asdict().items() if value is not None},
            }
        for time, level in timeline.activations[worker]:
            name = f"activations of worker {worker}"
            yield {"ph": "C", "pid": pid, "name": name, "ts": time * _UNIT, "args": {"micro-batches": level}}
    for index, reduction in enumerate(timeline.reductions):
        at = {"pid": pid, "cat": "reduction", "id": index, "name": f"reduction of stage {reduction.stage}"}
        yield {"ph": "b", "ts": reduction.start * _UNIT, "args": {"workers": reduction.workers}, **at}
        yield {"ph": "e", "ts": reduction.end * _UNIT, **at}
    yield from _messages(timeline, pid)


def _messages(timeline: Timeline, pid: int) -> Iterator[Event]:
    """An arrow per message, from the end of the sender's action to the start of the one that waits for it."""
    makers: dict[object, tuple[int, Action]] = {makes(action): (w, action) for w, action in timeline.schedule.actions}
    count = 0
    for worker, action in timeline.schedule.actions:
        for token in needs(action, timeline.schedule.stages):
            source, sender = makers[token]
            if source == worker:
                continue
            arrow = {"pid": pid, "cat": "message", "name": "message", "id": f"{pid}.{count}"}
            # An arrow binds to the slice at its time; the end of a slice is not part of it.
            left = timeline.span(sender)
            inside = left.start + 0.999 * (left.end - left.start)
            yield {"ph": "s", "tid": source, "ts": inside * _UNIT, **arrow}
            yield {"ph": "f", "bp": "e", "tid": worker, "ts": timeline.span(action).start * _UNIT, **arrow}
            count += 1
