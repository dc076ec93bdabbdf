"""Reads the state of a run from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cubeloom.base import settings
from cubeloom.base.errors import UserError
from cubeloom.train.job import Job
from cubeloom.train.metrics import log, timeline
from cubeloom.train.metrics.log import Log
from cubeloom.train.metrics.timeline import MeasuredStep
from cubeloom.train.run_metadata import settings_of

BEGINNINGS = ("start", "resume")
"""Events at the start of an attempt."""
_ENDS = {
    "done": "ended",
    "early stop": "ended early",
    "asked to stop": "stopped when asked to; the same command resumes",
}


@dataclass(frozen=True)
class Run:
    folder: Path
    job: Job
    settings: str  # the text of its file
    log: Log
    step: MeasuredStep | None
    why_no_step: str

    @property
    def state(self) -> str:
        """Its state, from what was recorded since its last start."""
        names = [event.name for event in self.log.events]
        began = max((place for place, name in enumerate(names) if name in BEGINNINGS), default=0)
        ends = [_ENDS[name] for name in names[began:] if name in _ENDS]
        return ends[-1] if ends else "no end was recorded: it still runs, or was stopped"

    @property
    def restarts(self) -> int:
        """How often it was restarted because a rank had failed."""
        return sum(event.name == "resume" and bool(event.fields.get("restart")) for event in self.log.events)

    def as_json(self) -> dict[str, Any]:
        """A summary."""
        records = self.log.records
        return {
            "folder": str(self.folder),
            "state": self.state,
            "steps": self.job.steps,
            "last": records[-1].as_json() if records else None,
            "skipped": sum(record.skipped is not None for record in records),
            "events": len(self.log.events),
            "timeline": self.step is not None,
        }


def read_run(folder: Path) -> Run:
    """Raises UserError for a folder that is not a run; a run that has not reached its first step is one."""
    file = settings_of(folder)
    job = settings.load(Job, file)
    try:
        found, text = log.read_log(folder / log.NAME), file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error}") from None
    step, why = None, "The run has no timeline of a step."
    if (folder / timeline.NAME).exists():
        try:
            step = timeline.read_timeline(folder / timeline.NAME)
        except UserError as error:
            why = f"There is no picture of a step: {error}"
    return Run(folder, job, text, found, step, why)
