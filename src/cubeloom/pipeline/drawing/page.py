"""A self-contained page: the SVG, and a script that shows what the action under the pointer waited for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from cubeloom.pipeline import Timeline
from cubeloom.pipeline.dependencies import makes, needs
from cubeloom.pipeline.drawing.palette import NAMES
from cubeloom.pipeline.drawing.svg import to_svg


def to_html(timelines: Sequence[Timeline], notes: Sequence[str] = (), heading: str = "") -> str:
    page = files("cubeloom.pipeline.drawing").joinpath("page.html").read_text(encoding="utf-8")
    names = ", ".join(dict.fromkeys(timeline.schedule.name for timeline in timelines))
    # A script must not contain "</": a browser would end it there.
    data = json.dumps([_panel(timeline) for timeline in timelines]).replace("</", "<\\/")
    holes = {
        "{{heading}}": escape(heading or f"Pipeline schedules: {names}"),
        "{{picture}}": to_svg(timelines, notes),
        "{{data}}": data,
    }
    for hole, content in holes.items():
        page = page.replace(hole, content)
    return page


def _panel(timeline: Timeline) -> list[dict[str, Any]]:
    """Every action in the order of the drawing, with the indices of those it needs in the same list."""
    schedule = timeline.schedule
    places: dict[object, int] = {}
    for place, (_, action) in enumerate(schedule.actions):
        token = makes(action)
        if token is not None:
            places[token] = place
    homes = [worker for worker, _ in schedule.actions]
    entries = []
    spans = [span for row in timeline.spans for span in row]
    for place, span in enumerate(spans):
        needed = [places[token] for token in needs(span.action, schedule.stages)]
        entries.append(
            {
                "name": str(span.action),
                "what": NAMES[span.action.kind],
                "stage": span.action.stage,
                "microbatch": span.action.microbatch,
                "replica": span.action.replica,
                "worker": homes[place],
                "start": span.start,
                "end": span.end,
                "needs": [
                    {
                        "at": other,
                        "arrives": spans[other].end
                        + (timeline.costs.message * span.action.size if homes[other] != homes[place] else 0.0),
                    }
                    for other in needed
                ],
            }
        )
    return entries
