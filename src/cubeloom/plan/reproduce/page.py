"""The page of a reproduction: published figures beside ours, and where the simulated time goes."""

from __future__ import annotations

from typing import Any

from cubeloom.base.pages import self_contained
from cubeloom.plan.reproduce.report import Report


def page(report: Report) -> str:
    """A self-contained page."""
    return self_contained("reproduced", report.title, view(report))


def view(report: Report) -> dict[str, Any]:
    """`plots`: figures of one kind, on one scale."""
    rows = [row for row in report.rows if row.point.name in report.plotted]
    ratios = [row.as_json() for row in rows if " over " in row.point.name]
    others = [row.as_json() for row in rows if " over " not in row.point.name]
    plots = [
        {"title": "Speed over another system", "unit": "how many times as fast", "one": True, "rows": ratios},
        {"title": "Other figures", "unit": "value", "one": False, "rows": others},
    ]
    return {**report.as_json(), "plots": [plot for plot in plots if plot["rows"]]}
