"""Announces what a training is about to do, before torch is imported: that takes seconds, and this a tenth of one."""

from __future__ import annotations

from collections.abc import Iterator

from cubeloom.base.errors import counted
from cubeloom.base.units import count, three
from cubeloom.models.configs import LanguageConfig
from cubeloom.models.named import kind_of
from cubeloom.models.sizes import parameters
from cubeloom.train.data.meta import META, Meta
from cubeloom.train.job.job import Job
from cubeloom.train.job.settings import Source


def announced(job: Job) -> str:
    """Raises UserError for errors that are already visible."""
    lines = {
        "model": _model(job),
        "grid": f"{job.grid}: {counted(job.grid.world, 'rank')} on {job.device}{_schedule(job)}",
        "data": _data(job),
        "steps": ", ".join(_steps(job)),
        "folder": f"{job.folder}{', whose run is resumed' if job.checkpoints.is_dir() else ''}",
    }
    return "\n".join(f"{name:7}{text}" for name, text in lines.items())


def _model(job: Job) -> str:
    config, name = job.config(), job.model.called
    if config is None:
        kind_of(name)
        return f"{name}, in {job.dtype}"
    vocabulary = f", a vocabulary of {config.vocab:,}" if isinstance(config, LanguageConfig) else ""
    return f"{name}, {count(parameters(config))} parameters in {job.dtype}{vocabulary}"


def _schedule(job: Job) -> str:
    schedule = job.schedule.schedule(job.grid.pipe)
    parts = counted(schedule.microbatches, "micro-batch").replace("batchs", "batches")
    return f", {schedule.name} with {parts}" if job.grid.pipe > 1 or schedule.microbatches > 1 else ""


def _data(job: Job) -> str:
    sources = ", ".join(map(_source, job.data.sources))
    if job.data.name not in (None, "random"):
        return f"{job.data.name}{' of ' if sources else ''}{sources}"
    return sources or "random samples, to try the grid: the loss will not fall"


def _source(source: Source) -> str:
    if source.folder is None:
        return f"{source.stream}, tokenized as it is read"
    if source.folder.is_dir() and not (source.folder / META).exists():
        return str(source.folder)  # of images
    meta = Meta.read(source.folder)
    return f"{source.folder}, {count(meta.training.tokens)} tokens"


def _steps(job: Job) -> Iterator[str]:
    samples, sequence = job.batch.samples, job.batch.sequence
    config = job.config()
    if sequence == 1:
        yield f"{job.steps:,} of {counted(samples, 'sample')}"
    elif config is None or isinstance(config, LanguageConfig):
        yield f"{job.steps:,} of {samples} × {sequence:,} = {count(samples * sequence)} tokens"
        yield f"{count(job.steps * samples * sequence)} in all"
    else:
        yield f"{job.steps:,} of {counted(samples, 'image')}"
    yield f"lr {three(job.rate.peak)}"
