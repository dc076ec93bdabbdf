"""Finds the checkpoint, job and model of a path that a user gives: a run or a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.settings import load
from cubeloom.models import PRESETS, ModelSource, OurModel
from cubeloom.tools.convert.checkpoint_files import config_of, is_checkpoint
from cubeloom.train.checkpoint import best, newest, read_manifest
from cubeloom.train.data.documents import HUB
from cubeloom.train.job import Job
from cubeloom.train.job.settings import ModelSettings, Source
from cubeloom.train.run_metadata import SETTINGS, from_run, settings_of


def checkpoint_of(given: Path, of_best: bool = False) -> Path:
    """A checkpoint, or the newest or the best of a run."""
    if is_checkpoint(given):
        if of_best:
            raise UserError(f"--best is for a run, and {given} is a checkpoint")
        return given
    if not given.is_dir():
        settings_of(given)
    found = best(given) if of_best else newest(given)
    if found is not None:
        return found
    if of_best and newest(given) is not None:
        raise UserError(f"{given} has no best checkpoint: set evaluation.every, and leave checkpoint.best on")
    raise UserError(f"{given} has no checkpoint yet" if run_of(given) else f"{given} is neither a run nor a checkpoint")


def run_of(given: Path) -> Path | None:
    """The run itself, or that of a checkpoint; None if there is none, as for an import."""
    places = (given, given.resolve().parent.parent)
    return next((place for place in places if (place / SETTINGS).is_file()), None)


def job_of(given: Path, checkpoint: Path, named: str | None = None) -> tuple[Job, ModelSource]:
    """The job, with the model that the checkpoint describes, and with paths that are valid from here.

    `named`: the `file.py:function` of the run's model, if it is one.
    """
    run = run_of(given)
    progress = dict(read_manifest(checkpoint)["progress"])
    if run is None:
        return Job(), OurModel(config_of(checkpoint, progress))
    job = load(Job, run / SETTINGS)
    _check_no_code(run, job, named)
    sources = tuple(_from_here(run, each) for each in job.data.sources)
    job = replace(job, data=replace(job.data, sources=sources), model=_model_from_here(run, job.model, named))
    source = job.source()
    # Its data may no longer exist, and with them the vocabulary.
    return job, OurModel(config_of(checkpoint, progress), source.preset) if isinstance(source, OurModel) else source


def _check_no_code(run: Path, job: Job, named: str | None) -> None:
    """Data and loss are read of the file that the user names for the model, or of none."""
    file = None if named is None else Path(named.rpartition(":")[0]).resolve()
    for name in (job.data.name, job.model.loss):
        if name is not None and ".py:" in name and Path(name.rpartition(":")[0]).resolve() != file:
            raise UserError(
                f"{run} uses {name}, and no file is executed that a run names, unless --model is of this file"
            )


def _model_from_here(run: Path, model: ModelSettings, named: str | None) -> ModelSettings:
    """A folder where the run found it; a file is executed only if the user names it."""
    if model.called in PRESETS:
        return model
    file, _, function = model.called.rpartition(":")
    if file.endswith(".py"):
        if named is None or named.rpartition(":")[2] != function:
            raise UserError(
                f"{run} is of {model.called}, and no file is executed that a run names: say it, as --model {model.called}"
            )
        return replace(model, name=named, preset=None)
    return replace(model, name=str(from_run(run, Path(model.called))), preset=None)


def _from_here(run: Path, source: Source) -> Source:
    """With the paths of the run's settings."""
    if source.folder is not None:
        return replace(source, folder=from_run(run, source.folder))
    changes: dict[str, Any] = {
        name: str(from_run(run, Path(value)))
        for name in ("stream", "tokenizer", "template")
        if (value := getattr(source, name)) is not None and not value.startswith(HUB)
    }
    return replace(source, **changes)
