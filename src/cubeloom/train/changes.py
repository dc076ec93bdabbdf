"""What changed since the previous attempt: a resumed run with another seed, grid or data should say so."""

from __future__ import annotations

from typing import Any

from cubeloom.base.settings import write
from cubeloom.train.decision import differences, flat
from cubeloom.train.job import Job
from cubeloom.train.run_metadata import code_versions, environment, environment_before, settings_before

_CODE_AND_DATA = (*code_versions(), "data")


def changes_since(job: Job) -> dict[str, str]:
    """By setting, `old → new`: all settings, code versions, and the hashes of the data; empty if nothing changed."""
    before, now = environment_before(job.folder), environment(job)
    if (text := settings_before(job.folder)) == "":
        return {}
    found = differences(flat(text), flat(write(job)))
    found |= differences(_code_and_data(before), _code_and_data(now)) if before else {}
    return {name: f"{old} → {new}" for name, (old, new) in found.items()}


def _code_and_data(environment: dict[str, Any]) -> dict[str, Any]:
    """For runs that earlier versions started, only what they recorded."""
    return {name: _short(environment[name]) for name in _CODE_AND_DATA if name in environment}


def _short(value: Any) -> Any:
    """Shorten the hashes of files to their first digits."""
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return value[:12] if isinstance(value, str) else value
