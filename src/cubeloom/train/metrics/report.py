"""A page about a run: its curves, a measured and simulated step, events, and settings."""

from __future__ import annotations

from pathlib import Path

from cubeloom.base.files import write_asked
from cubeloom.base.pages import self_contained
from cubeloom.train.metrics.run import Run, read_run
from cubeloom.train.metrics.view import view

NAME = "report.html"


def write_report(folder: Path, file: Path | None = None) -> Path:
    """Write one self-contained HTML file, by default `report.html` in the run's folder."""
    run = read_run(folder)
    file = folder / NAME if file is None else file
    write_asked(file, page(run))
    return file


def page(run: Run) -> str:
    return self_contained("runs", f"Run {run.folder.resolve().name}", {"runs": [view(run)]})
