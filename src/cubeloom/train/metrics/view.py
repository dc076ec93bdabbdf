"""A run as JSON: what the page of a run and the explorer draw."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from math import fsum, isfinite
from statistics import median
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.units import bytes_, count, seconds
from cubeloom.models.sizes import parameters
from cubeloom.pipeline.drawing.view import view as drawn
from cubeloom.train.job import Job
from cubeloom.train.metrics.charts import charts
from cubeloom.train.metrics.run import BEGINNINGS, Run
from cubeloom.train.metrics.thin import MOST

_MOST_EVENTS = 200


def view(run: Run, most: int = MOST) -> dict[str, Any]:
    """`most`: points of a curve."""
    return {
        "name": run.folder.resolve().name,
        "state": run.state,
        "facts": [{"name": name, "value": value} for name, value in _facts(run)],
        "charts": [chart.as_json() for chart in charts(run.log, most)],
        "step": _step(run),
        "events": _events(run),
        "earlier": max(0, len(run.log.events) - _MOST_EVENTS),
        "settings": run.settings,
    }


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    job, records = run.job, run.log.records
    pipeline = f", {job.schedule.name}" if job.grid.pipe > 1 else ""
    yield "model", f"{job.model.called}{_parameters(job)}, {job.dtype}, on {job.grid.world} × {job.device}"
    yield "grid", _grids(run) or f"{job.grid}{pipeline}"
    done = records[-1].step + 1 if records else 0
    yield "steps", f"{done:,} of {job.steps:,}; {run.state}"
    yield from _trained(run)
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


def _parameters(job: Job) -> str:
    """Nothing for a model that has no configuration of ours, or whose vocabulary is that of data which is gone."""
    try:
        config = job.config()
    except UserError:
        return ""
    return "" if config is None else f", {count(parameters(config))} parameters"


def _trained(run: Run) -> Iterator[tuple[str, str]]:
    """How much data, and how long."""
    job, records = run.job, run.log.records
    sources = ", ".join(str(each.folder or each.stream) for each in job.data.sources)
    yield "data", sources or "random samples"
    if records:
        step = job.batch.samples * job.batch.sequence
        unit = "tokens" if job.batch.sequence > 1 else "samples"
        yield f"{unit} seen", f"{count((records[-1].step + 1) * step)} ({count(step)} a step)"
        yield "time in steps", seconds(fsum(record.seconds for record in records if isfinite(record.seconds)))


def _grids(run: Run) -> str:
    """If attempts had different grids: each with the first step that it trained."""
    began = [(event.fields.get("grid"), event) for event in run.log.events if event.name in BEGINNINGS]
    if len({grid for grid, _ in began if grid is not None}) < 2:
        return ""
    changes = [(grid, event) for place, (grid, event) in enumerate(began) if not place or began[place - 1][0] != grid]
    return "; ".join(
        f"{grid} from step {event.step} (attempt {event.fields.get('attempt')})" for grid, event in changes
    )


def _step(run: Run) -> dict[str, Any]:
    """The measured step above the simulated one, or why there is none."""
    if run.step is None:
        return {"why": run.why_no_step}
    measured, simulated = run.step.measured, run.step.simulated
    longer = measured.makespan / simulated.makespan if simulated.makespan else 1.0
    words = (
        f"Step {run.step.step}, both on one scale: above as it was measured, below as the simulator has the same actions, "
        "each as long as the median of its kind and stage above. There messages arrive at once, and no action is slower "
        f"than others of its kind; the measured step took {longer:.2f} times as long."
    )
    return {"words": words, "timelines": [drawn(each, unit="ms") for each in (measured, simulated)]}


def _events(run: Run) -> list[dict[str, str]]:
    return [
        {
            "time": datetime.fromtimestamp(event.time, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            "name": event.name,
            "fields": ", ".join(f"{name} {value}" for name, value in event.fields.items()),
        }
        for event in run.log.events[-_MOST_EVENTS:]
    ]
