"""What is kept beside a run: the settings as they were resolved, and with what it ran."""

from __future__ import annotations

import json
import platform
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from cubeloom.errors import UserError
from cubeloom.files import replace_text
from cubeloom.host import version
from cubeloom.job import Job
from cubeloom.settings import write

SETTINGS, ENVIRONMENT = "settings.toml", "environment.json"


def write_beside(job: Job) -> None:
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        replace_text(job.folder / SETTINGS, write(job))
        replace_text(job.folder / ENVIRONMENT, json.dumps(_environment(), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"folder = {str(job.folder)!r} cannot be written to: {error.strerror}") from None


def from_run(run: Path, path: Path) -> Path:
    """A path of a run's settings, which begins where the run was begun; or here, where that is not known or has moved away."""
    with suppress(OSError, ValueError, KeyError):
        there = Path(json.loads((run / ENVIRONMENT).read_text())["directory"]) / path
        if there.exists():
            return there
    return path


def _environment() -> dict[str, str]:
    return {
        "command": " ".join(sys.argv),
        "directory": str(Path.cwd()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cubeloom": version("cubeloom") or "not installed",
    }
