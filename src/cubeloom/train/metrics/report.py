"""A page about a run: its curves, a measured and simulated step, events, and settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from math import isfinite
from pathlib import Path
from statistics import median

from cubeloom.base.files import write_asked
from cubeloom.base.units import bytes_, count
from cubeloom.pipeline import drawing as show
from cubeloom.train.metrics.chart import LEFT, WIDTH, Chart
from cubeloom.train.metrics.charts import charts
from cubeloom.train.metrics.run import BEGINNINGS, Run, read_run

NAME = "report.html"
_MOST_EVENTS = 200


def write_report(folder: Path, file: Path | None = None) -> Path:
    """Write one self-contained HTML file, by default `report.html` in the run's folder."""
    run = read_run(folder)
    file = folder / NAME if file is None else file
    write_asked(file, page(run))
    return file


def page(run: Run) -> str:
    found = charts(run.log)
    holes = {
        "heading": escape(f"Run {run.folder.resolve().name}"),
        "facts": _table(_facts(run)),
        "charts": _charts(found),
        "step": _step(run),
        "events": _events(run),
        "settings": escape(run.settings),
        # Our own numbers and names: no text that could end a script.
        "data": json.dumps([chart.as_json() for chart in found]),
        "frame": json.dumps([LEFT, WIDTH]),
    }
    return _filled(files("cubeloom.train.metrics").joinpath(NAME).read_text(encoding="utf-8"), holes)


def _filled(template: str, holes: Mapping[str, str]) -> str:
    """Fill all placeholders at once: the text for one may contain the name of another."""
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: holes[hole[1]], template)


def _table(rows: Iterator[tuple[str, str]]) -> str:
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(lines)}</table>"


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    job, records = run.job, run.log.records
    pipeline = f", {job.schedule.name}" if job.grid.pipe > 1 else ""
    yield "model", f"{job.model.called}, {job.dtype}, on {job.grid.world} × {job.device}"
    yield "grid", _grids(run) or f"{job.grid}{pipeline}"
    done = records[-1].step + 1 if records else 0
    yield "steps", f"{done:,} of {job.steps:,}; {run.state}"
    if run.log.unread:
        yield "lines that could not be read", f"{run.log.unread} of metrics.jsonl: a crash can cut off the last one"
    if not records:
        return
    yield "last loss", f"{records[-1].loss:.5g}"
    judged = [(r.validation, r.step) for r in records if r.validation is not None and isfinite(r.validation)]
    if judged:
        best, step = min(judged)
        yield "best on validation", f"{best:.5g}, after step {step}"
    yield "tokens", f"{count(median(record.tokens_per_s for record in records))} a second (median)"
    used = [record.mfu for record in records if record.mfu is not None]
    yield "MFU", f"{median(used):.1%} (median)" if used else "unknown: no peak is known for this device"
    memory = max((record.memory_bytes for record in records if record.memory_bytes is not None), default=None)
    yield "peak memory of a rank", bytes_(memory) if memory is not None else "not measured"
    yield "updates skipped", str(sum(record.skipped is not None for record in records))
    yield "restarts", str(run.restarts)


def _grids(run: Run) -> str:
    """If attempts had different grids: each with the first step that it trained."""
    began = [(event.fields.get("grid"), event) for event in run.log.events if event.name in BEGINNINGS]
    if len({grid for grid, _ in began if grid is not None}) < 2:
        return ""
    changes = [(grid, event) for place, (grid, event) in enumerate(began) if not place or began[place - 1][0] != grid]
    return "; ".join(
        f"{grid} from step {event.step} (attempt {event.fields.get('attempt')})" for grid, event in changes
    )


def _charts(found: Sequence[Chart]) -> str:
    if not found:
        return "<p>The run has not come to the end of a step.</p>"
    figures = (f"<figure><figcaption>{escape(chart.title)}</figcaption>{chart.svg()}</figure>" for chart in found)
    return f'<div class="charts">{"".join(figures)}</div>'


def _step(run: Run) -> str:
    if run.step is None:
        return f"<p>{escape(run.why_no_step)}</p>"
    measured, simulated = run.step.measured, run.step.simulated
    longer = measured.makespan / simulated.makespan if simulated.makespan else 1.0
    words = (
        f"Step {run.step.step}, both on one scale: above as it was measured, below as the simulator has the same actions, "
        "each as long as the median of its kind and stage above. There messages arrive at once, and no action is slower "
        f"than others of its kind; the measured step took {longer:.2f} times as long."
    )
    return f'<p>{escape(words)}</p><div class="picture">{show.to_svg([measured, simulated])}</div>'


def _events(run: Run) -> str:
    events = run.log.events
    if not events:
        return "<p>None were recorded.</p>"
    rows = []
    for event in events[-_MOST_EVENTS:]:
        when = datetime.fromtimestamp(event.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        fields = ", ".join(f"{name} {value}" for name, value in event.fields.items())
        rows.append(f"<tr><td>{when}</td><td>{escape(event.name)}</td><td>{escape(fields)}</td></tr>")
    earlier = len(events) - len(rows)
    note = f"<p>The last {len(rows)}; {earlier:,} earlier ones are in metrics.jsonl.</p>" if earlier else ""
    return f"{note}<table><tr><th>time (UTC)</th><th>event</th><th></th></tr>{''.join(rows)}</table>"
