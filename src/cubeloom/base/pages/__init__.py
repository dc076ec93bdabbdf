"""The views that our pages share: one style sheet, and a script for each view that draws its JSON.

`cubeloom explore` serves them; `self_contained` writes one with its data into a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any, Literal

View = Literal["plan", "schedules", "runs", "reproduced"]
SCRIPTS = ("dom.js", "charts.js", "timeline.js", "plan.js", "schedules.js", "runs.js")
"""In the order in which a page loads them."""
CURVES = ("uPlot.iife.min.js", "uPlot.min.css")
"""The charting library (MIT, its licence beside it), which curves over steps need."""
_NEEDED: dict[View, tuple[str, ...]] = {
    "plan": ("dom.js", "timeline.js", "plan.js"),
    "schedules": ("dom.js", "timeline.js", "schedules.js"),
    "reproduced": ("dom.js", "reproduced.js"),
    "runs": (CURVES[0], "dom.js", "charts.js", "timeline.js", "runs.js"),
}


def static(name: str) -> str:
    """The text of a file that pages load."""
    return files("cubeloom.base.pages").joinpath("static", name).read_text(encoding="utf-8")


def self_contained(view: View, title: str, data: Mapping[str, Any]) -> str:
    """One HTML file, which loads nothing: the browser refuses every request that it would make."""
    styles = [*([CURVES[1]] if CURVES[0] in _NEEDED[view] else []), "style.css"]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{''.join(map(static, styles))}</style>\n</head>\n<body>\n"
        f'<header class="top"><h1>{escape(title)}</h1><button type="button" id="theme"></button></header>\n'
        '<main id="view"><noscript>This page draws its data with a script.</noscript></main>\n'
        # A script ends at the first "</", also inside a text.
        f'<script type="application/json" id="data">{embedded(data)}</script>\n'
        f"<script>\n{''.join(map(static, _NEEDED[view]))}\ncubeloom.alone({json.dumps(view)});\n</script>\n"
        "</body>\n</html>\n"
    )


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that neither ends nor opens an element of the page that it stands in."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
