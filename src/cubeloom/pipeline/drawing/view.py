"""A timeline as JSON, for pages that draw it and say what each action waited for; and one such page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from cubeloom.base.pages import self_contained
from cubeloom.pipeline import Timeline
from cubeloom.pipeline.dependencies import makes, needs
from cubeloom.pipeline.drawing.terminal import bubble


def to_html(timelines: Sequence[Timeline], notes: Sequence[str] = (), heading: str = "") -> str:
    """A self-contained page."""
    names = ", ".join(dict.fromkeys(timeline.schedule.name for timeline in timelines))
    drawn = [view(timeline, note) for timeline, note in zip(timelines, chain(notes, repeat("")), strict=False)]
    return self_contained("schedules", heading or f"Pipeline schedules: {names}", {"timelines": drawn})


def view(timeline: Timeline, note: str = "", unit: str = "") -> dict[str, Any]:
    """`unit`: of its times, such as s; empty for units of the costs that were given."""
    schedule = timeline.schedule
    return {
        "name": schedule.name,
        "note": note,
        "unit": unit,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "replicas": schedule.replicas,
        "makespan": _six(timeline.makespan),
        "ideal": _six(timeline.ideal),
        "bubble": bubble(timeline),
        "idle": list(timeline.bubble_ratio),
        "weight_copies": timeline.weight_copies,
        "peaks": list(timeline.peak_activations),
        "memory": [[[_six(time), level] for time, level in curve] for curve in timeline.activations],
        "actions": _actions(timeline),
        "reductions": [
            {"stage": each.stage, "workers": list(each.workers), "start": _six(each.start), "end": _six(each.end)}
            for each in timeline.reductions
        ],
    }


def _actions(timeline: Timeline) -> list[dict[str, Any]]:
    """Every action, worker by worker in its order, with the indices of those it needs in the same list."""
    schedule = timeline.schedule
    places: dict[object, int] = {}
    for place, (_, action) in enumerate(schedule.actions):
        token = makes(action)
        if token is not None:
            places[token] = place
    homes = [worker for worker, _ in schedule.actions]
    spans = [span for row in timeline.spans for span in row]
    entries = []
    for place, span in enumerate(spans):
        action = span.action
        sent = timeline.costs.message * action.size
        entries.append(
            {
                "name": str(action),
                "kind": str(action.kind),
                "stage": action.stage,
                "microbatch": action.microbatch,
                "replica": action.replica,
                "part": action.part,
                "worker": homes[place],
                "start": _six(span.start),
                "end": _six(span.end),
                "needs": [
                    {"at": other, "arrives": _six(spans[other].end + (sent if homes[other] != homes[place] else 0.0))}
                    for other in (places[token] for token in needs(action, schedule.stages))
                ],
            }
        )
    return entries


def _six(time: float) -> float:
    """Six digits: more than a picture shows, in a third of the text."""
    return float(f"{time:.6g}")
