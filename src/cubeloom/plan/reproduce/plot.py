"""The plot: published beside our figures as bars, and below where our time goes, as a self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from cubeloom.plan.reproduce.report import Report, Row, Share

_LEFT, _WIDTH, _RIGHT = 340, 520, 130
_BAR, _PAIR, _HEAD = 13, 40, 56
_PUBLISHED, _OURS, _FITTED = "#9aa7b4", "#2f6fb5", "#d08a2e"
_KINDS = {  # of seconds, in the order of the stacks
    "computed": "#2f6fb5",
    "exposed": "#c8553d",
    "waited": "#e8c1b8",
    "summed": "#7a3ea1",
    "updated": "#4c9f70",
}
_STYLE = """
text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1c2733 }
.title { font-size: 15px; font-weight: 600 } .note { fill: #5c6b7a } .end { text-anchor: end }
"""


def to_svg(report: Report) -> str:
    rows = [row for row in report.rows if row.point.name in report.plotted]
    height = _HEAD + _PAIR * len(rows)
    total = height + _HEAD + _PAIR // 2 * len(report.shares) + 24
    width = _LEFT + _WIDTH + _RIGHT
    parts = [
        f'<text x="16" y="22" class="title">{escape(report.title)}</text>',
        *_legend(_row_colours(rows), 42),
        *_pairs(rows, _HEAD),
        f'<text x="16" y="{height + 22:g}" class="title">Where our seconds go</text>',
        *_legend(_share_colours(report.shares), height + 42),
        *_stacks(report.shares, height + _HEAD),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>'
    )


def _row_colours(rows: Sequence[Row]) -> dict[str, str]:
    found = {"published": _PUBLISHED, "ours": _OURS}
    return {**found, "ours, calibrated here": _FITTED} if any(row.calibrated for row in rows) else found


def _share_colours(shares: Sequence[Share]) -> dict[str, str]:
    return {kind: colour for kind, colour in _KINDS.items() if any(kind in share.seconds for share in shares)}


def _legend(colours: dict[str, str], y: float) -> Iterator[str]:
    x = float(_LEFT)
    for name, colour in colours.items():
        yield f'<rect x="{x:g}" y="{y - 10:g}" width="10" height="10" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 14:g}" y="{y:g}" class="note">{escape(name)}</text>'
        x += 34 + 6.6 * len(name)


def _pairs(rows: Sequence[Row], top: float) -> Iterator[str]:
    scale = _WIDTH / max((value for row in rows for value in (row.point.value, row.ours)), default=1.0)
    for place, row in enumerate(rows):
        y = top + place * _PAIR
        yield f'<text x="{_LEFT - 8}" y="{y + 17:g}" class="end">{escape(row.point.name)}</text>'
        bars = ((row.point.value, _PUBLISHED), (row.ours, _FITTED if row.calibrated else _OURS))
        for number, (value, colour) in enumerate(bars):
            at = y + number * (_BAR + 1)
            yield f'<rect x="{_LEFT}" y="{at:g}" width="{value * scale:.1f}" height="{_BAR}" fill="{colour}"/>'
            yield f'<text x="{_LEFT + value * scale + 5:.1f}" y="{at + 11:g}" class="note">{value:.3g}</text>'


def _stacks(shares: Sequence[Share], top: float) -> Iterator[str]:
    scale = _WIDTH / max((share.total for share in shares), default=1.0)
    for place, share in enumerate(shares):
        y, x = top + place * _PAIR // 2, float(_LEFT)
        yield f'<text x="{_LEFT - 8}" y="{y + 11:g}" class="end">{escape(share.name)}</text>'
        for kind, seconds in share.seconds.items():
            title = f"<title>{kind}: {seconds:.4g} s</title>"
            box = f'x="{x:.1f}" y="{y:g}" width="{seconds * scale:.1f}" height="{_BAR}"'
            yield f'<rect {box} fill="{_KINDS[kind]}">{title}</rect>'
            x += seconds * scale
        yield f'<text x="{x + 5:.1f}" y="{y + 11:g}" class="note">{share.total:.3g} s</text>'
