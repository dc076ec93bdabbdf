"""The decision how an attempt starts: rank 0 makes it, and the other ranks follow it or stop.

Each rank reads files itself, and machines may see different ones: a file server returns an old listing, or a settings
file was not copied everywhere. Therefore ranks do not decide individually.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.file_errors import retried
from cubeloom.base.settings import write
from cubeloom.comm import HostGroup
from cubeloom.train.checkpoint import OtherModel, check_fits, newest, read_manifest
from cubeloom.train.job import Job
from cubeloom.train.metrics.log import NAME as METRICS
from cubeloom.train.metrics.log import Event, read_log
from cubeloom.train.metrics.run import BEGINNINGS
from cubeloom.train.optimizers import check_elementwise
from cubeloom.train.run_metadata import code_versions

_MOST = 5  # differences named in a message


@dataclass(frozen=True)
class Decision:
    checkpoint: Path | None
    """The checkpoint of this run to resume from."""
    start: Path | None
    """The checkpoint of another run, or of an import, whose weights this run starts with."""
    step: int
    """The number of completed steps."""
    settings: str
    """All settings of the job, as TOML."""
    versions: Mapping[str, str]
    """The versions of the programs that train."""
    attempt: int
    """From 1, over all commands that trained in this folder."""
    restart: int
    """How often rank 0's launcher restarted this attempt's command."""

    @property
    def settings_hash(self) -> str:
        return hashlib.sha256(self.settings.encode()).hexdigest()[:16]


def decide(job: Job, host_group: HostGroup, restart: int = 0) -> Decision:
    """Called by all ranks. Raises UserError on all of them if one was given another job or has other programs."""
    decision = host_group.follow_first(lambda: _decide(job, restart))
    host_group.agree(lambda: _check_same(decision, job))
    return decision


def check_begin(job: Job) -> None:
    """Check that the checkpoint to resume from, or to start with, exists and fits the model."""
    shapes = {name: parameter.shape for name, parameter in job.skeleton().named_parameters()}
    found, start = newest(job.folder), job.model.start
    if found is None:
        _check_not_lost(job.folder)
    if found is not None:
        try:
            check_fits(found, shapes, check_elementwise(job.optimizer, job.given_optimizer))
        except OtherModel as error:
            raise OtherModel(f"{error}; train this one in another folder, as --folder {job.folder}-2") from None
    elif start is not None:
        check_fits(newest(start) or start, shapes)


def _decide(job: Job, restart: int) -> Decision:
    check_begin(job)
    checkpoint, start = newest(job.folder), None
    if checkpoint is None and job.model.start is not None:
        start = newest(job.model.start) or job.model.start
    return Decision(
        checkpoint,
        start,
        0 if checkpoint is None else int(read_manifest(checkpoint)["step"]),
        write(job),
        code_versions(),
        1 + _attempts(job.folder),
        restart,
    )


def _check_not_lost(folder: Path) -> None:
    """Refuse to start over if a run had checkpoints and has none now: it would silently lose its progress."""
    saved = 0  # in this attempt: its first save may be incomplete, and a second starts only after the first
    for event in _events(folder):
        saved = 0 if event.name in BEGINNINGS else saved + (event.name == "checkpoint")
        if saved > 1 or (event.name == "resume" and event.step):
            raise UserError(
                f"{folder / METRICS} tells of checkpoints, and this machine sees none in {folder}: bring them back, or begin "
                "a new run in another folder"
            )


def _attempts(folder: Path) -> int:
    return sum(event.name in BEGINNINGS for event in _events(folder))


def _events(folder: Path) -> tuple[Event, ...]:
    file = folder / METRICS
    return retried(f"{file} cannot be read", lambda: read_log(file)).events


def _check_same(decision: Decision, job: Job) -> None:
    found = differences(flat(decision.settings), flat(write(job)))
    found |= differences(dict(decision.versions), code_versions())
    if found:
        said = "; ".join(
            f"{name} is {here}, and {there} on rank 0" for name, (there, here) in list(found.items())[:_MOST]
        )
        rest = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise UserError(f"not what rank 0 trains: {said}{rest}; give all ranks the same settings and programs")


def flat(toml: str) -> dict[str, Any]:
    """Each setting of a file as `a.b`; empty if the file cannot be parsed."""
    try:
        return _flat(tomllib.loads(toml), "")
    except tomllib.TOMLDecodeError:
        return {}


def _flat(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{path}{name}.") if isinstance(value, dict) else {f"{path}{name}": value}
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, with old and new values; `unset` if one side has none."""
    names = [*before, *(name for name in now if name not in before)]
    pairs = {name: (before.get(name, "unset"), now.get(name, "unset")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
