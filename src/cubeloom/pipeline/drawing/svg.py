"""Timelines as SVG: schedules one above the other on one time axis, bubbles hatched, memory below each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from cubeloom.pipeline import Kind, Timeline
from cubeloom.pipeline.action import COMPUTE
from cubeloom.pipeline.drawing.palette import NAMES, colour, ink, line
from cubeloom.pipeline.drawing.terminal import bubble
from cubeloom.pipeline.memory import Curve
from cubeloom.pipeline.simulator import Span

_LEFT, _RIGHT, _WIDTH = 44, 76, 1100  # margins and the width of the time axis
_ROW, _GAP = 22, 3
_MEMORY = 74
_STYLE = """
text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1c2733 }
.title { font-size: 15px; font-weight: 600 } .note, .axis, .worker { fill: #5c6b7a }
.act text { font-size: 10.5px; text-anchor: middle; pointer-events: none }
.act rect { stroke: #ffffff; stroke-width: 0.8 } .end { text-anchor: end } .middle { text-anchor: middle }
"""


def to_svg(timelines: Sequence[Timeline], notes: Sequence[str] = ()) -> str:
    """A self-contained picture."""
    longest = max(timeline.makespan for timeline in timelines)
    scale = _WIDTH / longest if longest else 1.0
    parts: list[str] = []
    top = 34.0
    for index, timeline in enumerate(timelines):
        note = notes[index] if index < len(notes) else ""
        panel, height = _panel(timeline, index, scale, note)
        parts.append(f'<g class="panel" data-panel="{index}" transform="translate(0 {top:g})">{panel}</g>')
        top += height
    kinds = [kind for kind in COMPUTE if any(a.kind is kind for t in timelines for _, a in t.schedule.actions)]
    width = _LEFT + _WIDTH + _RIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top:g}" width="{width}" height="{top:g}">'
        f"<style>{_STYLE}</style>{_HATCH}"
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(_legend(kinds, timelines))}{"".join(parts)}</svg>'
    )


_HATCH = (
    '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#fdf0ee"/><rect width="1.6" height="6" fill="#eec4bd"/></pattern></defs>'
)


def _legend(kinds: Sequence[Kind], timelines: Sequence[Timeline]) -> Iterator[str]:
    """The shades, once per direction that occurs."""
    replicas = max(timeline.schedule.replicas for timeline in timelines)
    at = float(_LEFT)
    for kind in kinds:
        for replica in range(min(replicas, 2)):
            fill = colour(next(iter(timelines[0].schedule.workers[0]))._replace(kind=kind, replica=replica))
            yield f'<rect x="{at:g}" y="9" width="14" height="14" rx="2" fill="{fill}"/>'
            at += 16
        yield f'<text x="{at + 3:g}" y="20">{NAMES[kind]}</text>'
        at += 24 + 6.6 * len(NAMES[kind])
    yield f'<rect x="{at:g}" y="9" width="14" height="14" rx="2" fill="url(#bubble)"/>'
    yield f'<text x="{at + 19:g}" y="20">bubble</text>'
    if replicas > 1:
        yield f'<text x="{at + 84:g}" y="20" class="note">blue goes down the workers, orange up</text>'


def _panel(timeline: Timeline, index: int, scale: float, note: str) -> tuple[str, float]:
    schedule = timeline.schedule
    workers = len(schedule.workers)
    title = f"{schedule.name}: {timeline.makespan:g}, of which {bubble(timeline):.1%} bubble"
    facts = f"{workers} workers, {schedule.microbatches} micro-batches, ideal {timeline.ideal:g}"
    parts = [
        f'<text x="{_LEFT}" y="22" class="title">{escape(title)}</text>',
        f'<text x="{_LEFT + _WIDTH}" y="22" class="note end">{escape(note or facts)}</text>',
    ]
    top = 32.0
    count = 0
    for worker, row in enumerate(timeline.spans):
        y = top + worker * (_ROW + _GAP)
        end = timeline.makespan * scale
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 15:g}" class="worker end">P{worker}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y:g}" width="{end:g}" height="{_ROW}" fill="url(#bubble)"/>')
        ratio = f"{timeline.bubble_ratio[worker]:.0%} idle"
        parts.append(f'<text x="{_LEFT + end + 6:g}" y="{y + 15:g}" class="note">{ratio}</text>')
        for span in row:
            parts.append(_action(span, f"a{index}-{count}", _LEFT + span.start * scale, y, scale))
            count += 1
    top += workers * (_ROW + _GAP)
    parts += _reductions(timeline, scale, 32.0)
    ideal = _LEFT + timeline.ideal * scale
    parts.append(f'<path d="M{ideal:g} 28V{top:g}" stroke="#1a7f37" stroke-width="1.5" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{ideal:g}" y="{top + 11:g}" class="note middle">ideal</text>')
    parts += _memory(timeline, scale, top + 16)
    return "".join(parts), top + 16 + _MEMORY + 30


def _action(span: Span, name: str, x: float, y: float, scale: float) -> str:
    action = span.action
    width = (span.end - span.start) * scale
    if action.kind not in COMPUTE:
        return f'<path id="{name}" d="M{x:.2f} {y}v{_ROW}" stroke="#111" stroke-width="2"/>'
    label = str(action.microbatch) + ("ab"[action.part] if action.part is not None else "")
    text = ""
    if width >= 6 * len(label):
        text = f'<text x="{x + width / 2:.2f}" y="{y + 15:g}" style="fill:{ink(action)}">{label}</text>'
    box = f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_ROW}" fill="{colour(action)}"/>'
    return f'<g class="act" id="{name}"><title>{action}: {span.start:g} to {span.end:g}</title>{box}{text}</g>'


def _reductions(timeline: Timeline, scale: float, top: float) -> Iterator[str]:
    """A bar under the row of each participating worker."""
    for reduction in timeline.reductions:
        for worker in reduction.workers:
            x, width = _LEFT + reduction.start * scale, (reduction.end - reduction.start) * scale
            y = top + worker * (_ROW + _GAP) + _ROW - 3
            title = f"<title>reduction of stage {reduction.stage}: {reduction.start:g} to {reduction.end:g}</title>"
            yield f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="4" fill="#7a3ea1">{title}</rect>'


def _memory(timeline: Timeline, scale: float, top: float) -> Iterator[str]:
    """Activations of each worker over time, in micro-batches of a worker's share."""
    highest = max(timeline.peak_activations, default=0.0) or 1.0
    lowest = min(timeline.peak_activations)
    base = top + _MEMORY
    peaks = f"peak {highest:g}" if lowest == highest else f"peaks {lowest:g} to {highest:g}"
    copies = f"weights {timeline.weight_copies:g} ×"
    yield f'<text x="{_LEFT - 8}" y="{top + 12:g}" class="axis end">{highest:g}</text>'
    yield f'<text x="{_LEFT - 8}" y="{base:g}" class="axis end">0</text>'
    yield f'<path d="M{_LEFT} {base:g}h{_WIDTH}" stroke="#c8d0d8"/>'
    yield f'<text x="{_LEFT + timeline.makespan * scale:g}" y="{base + 15:g}" class="axis end">{timeline.makespan:g}</text>'
    yield f'<text x="{_LEFT}" y="{base + 15:g}" class="note">activations in flight: {peaks}; {copies}</text>'
    for worker, curve in enumerate(timeline.activations):
        path = _steps(curve, scale, base, (_MEMORY - 6) / highest)
        stroke = line(worker, len(timeline.activations))
        title = f"<title>worker {worker}: peak {timeline.peak_activations[worker]:g}</title>"
        yield f'<path class="level" d="{path}" fill="none" stroke="{stroke}" stroke-width="1.4">{title}</path>'


def _steps(curve: Curve, scale: float, base: float, unit: float) -> str:
    path = f"M{_LEFT} {base:g}"
    for time, level in curve:
        path += f"H{_LEFT + time * scale:.2f}V{base - level * unit:.2f}"
    return path
