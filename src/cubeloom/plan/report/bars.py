"""Stacked bars as SVG, one below the other on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#3b7dd8", "#e2a33d", "#c8553d", "#6a994e", "#8d6ab8", "#4aa3a2", "#9aa5b1")
_LEFT, _WIDTH, _ROW = 330, 760, 24


@dataclass(frozen=True)
class Bar:
    name: str
    parts: dict[str, float]


def stacked(bars: Sequence[Bar]) -> str:
    longest = max((sum(bar.parts.values()) for bar in bars), default=0.0) or 1.0
    names = list(dict.fromkeys(part for bar in bars for part in bar.parts))
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
    height = _ROW * (len(bars) + 1) + 6
    parts = [_legend(names, colours)]
    for place, bar in enumerate(bars):
        parts.append(_bar(bar, _ROW * (place + 1) + 6, _WIDTH / longest, colours))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 90} {height}" '
        f'width="{_LEFT + _WIDTH + 90}" height="{height}" font-family="system-ui, sans-serif" font-size="12">'
        f"{''.join(parts)}</svg>"
    )


def _legend(names: Sequence[str], colours: dict[str, str]) -> str:
    found, at = [], float(_LEFT)
    for name in names:
        found.append(f'<rect x="{at:g}" y="4" width="12" height="12" fill="{colours[name]}"/>')
        found.append(f'<text x="{at + 16:g}" y="14">{escape(name)}</text>')
        at += 34 + 6.4 * len(name)
    return "".join(found)


def _bar(bar: Bar, top: float, scale: float, colours: dict[str, str]) -> str:
    found = [f'<text x="{_LEFT - 8}" y="{top + 14:g}" text-anchor="end">{escape(bar.name)}</text>']
    at = float(_LEFT)
    for name, value in bar.parts.items():
        width = value * scale
        title = f"<title>{escape(name)}: {value:.4g}</title>"
        found.append(
            f'<rect x="{at:.2f}" y="{top:g}" width="{width:.2f}" height="18" fill="{colours[name]}">{title}</rect>'
        )
        at += width
    found.append(f'<text x="{at + 6:.2f}" y="{top + 14:g}">{sum(bar.parts.values()):.4g}</text>')
    return "".join(found)
