"""Folders of runs, as a training loop leaves them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from cubeloom.base import settings
from cubeloom.base.grid import Grid
from cubeloom.pipeline import Costs, Schedule, simulate
from cubeloom.train.job import Job
from cubeloom.train.job.settings import ScheduleSettings
from cubeloom.train.metrics import Metrics, Record


def record(step: int, **changed: Any) -> Record:
    plain = Record(
        step=step,
        loss=4.0 - step / 1000,
        gradient_norm=1.5,
        learning_rate=1e-3,
        seconds=0.1,
        tokens_per_s=5120.0,
        memory_bytes=2**30,
        computing_s=0.06,
        exposed_s=0.01,
        bubble_s=0.02,
    )
    return replace(plain, **changed)


def a_run(folder: Path, records: list[Record], steps: int = 10) -> Job:
    job = Job(folder=folder, steps=steps, grid=Grid(pipe=2), schedule=ScheduleSettings(name="chimera"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text(settings.write(job))
    with Metrics(folder, job.metrics, 0) as metrics:
        metrics.event("start", ranks=2)
        for each in records:
            metrics.write(each)
    return job


def write_timeline(folder: Path, schedule: Schedule, costs: Costs) -> None:
    """As measured where everything takes just these costs, a millisecond after the step began."""
    rows = [
        [{"action": str(s.action), "start": s.start + 1e-3, "end": s.end + 1e-3} for s in row]
        for row in simulate(schedule, costs).spans
    ]
    content = {"step": 3, "schedule": str(schedule), "workers": rows, "unit": "s"}
    (folder / "timeline.json").write_text(json.dumps(content))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
