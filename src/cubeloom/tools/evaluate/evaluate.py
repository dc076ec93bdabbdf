"""Evaluation as a command: the ranks of a grid read a checkpoint. No file is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.comm import Network, devices, world
from cubeloom.launch import run as run_ranks
from cubeloom.launch.environment import current, membership
from cubeloom.launch.ready import check_startable, join
from cubeloom.models import ModelSource, skeleton
from cubeloom.parallel import Batch
from cubeloom.pipeline.runtime.build import plan_stages
from cubeloom.pipeline.runtime.microbatches import portions
from cubeloom.tools.evaluate.found import checkpoint_of, job_of
from cubeloom.train.checkpoint import check_fits, load_weights, read_manifest
from cubeloom.train.data import Mixture, Samples, Stream, TokenFile
from cubeloom.train.data.stream import IGNORED
from cubeloom.train.evaluation import mean_loss
from cubeloom.train.job import Job
from cubeloom.train.job.images import Images
from cubeloom.train.job.samples import samples_of
from cubeloom.train.job.settings import DataSettings, LayoutSettings, ScheduleSettings, Source
from cubeloom.train.trainer import pipeline_of

_LONGEST = 14 * 86400.0  # the most seconds of an evaluation
Run = Callable[..., list[Any]]
"""Runs a function on this many ranks: `launch.run`, or that of an existing pool."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The checkpoint, the data and the grid. Options that are not given are those of the run."""

    given: Path
    """A run or a checkpoint."""
    best: bool = False
    model: str | None = None
    """The `file.py:function` of the run's model, if it is one: a file is not executed just because a run names it."""
    data: Path | None = None
    """A token folder: its validation part, or all of it if it has none."""
    grid: Grid | None = None
    batches: int | None = None
    """By default enough for all samples."""
    sequence: int | None = None
    device: devices.Kind | None = None


@dataclass(frozen=True)
class Evaluated:
    checkpoint: Path
    step: int
    loss: float
    """The mean over all targets that count."""
    targets: int
    samples: int
    grid: Grid

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class _Work:
    """The arguments of each rank."""

    job: Job
    source: ModelSource
    checkpoint: Path
    data: Path | None
    count: int
    """The total number of samples."""


def evaluate(asked: Evaluation, run: Run | None = None) -> Evaluated | None:
    """On the ranks that a launcher started, or on this machine. Raises UserError before a process starts.

    Returns None on a launcher's ranks other than the first.
    """
    work = _work(asked)
    grid, here = work.job.grid, membership(current())
    if here is None:
        check_startable(grid.world)
        begin = run or run_ranks
        options = {} if run else {"device": work.job.device}
        loss, targets = begin(grid.world, _on_rank, work, timeout=_LONGEST, **options)[0]
    else:
        if here.world != grid.world:
            raise UserError(f"the grid {grid} needs {grid.world} ranks, and {here.by} started {here.world}")
        join(here, work.job.device, work.job.patience)
        loss, targets = _on_rank(work)
        world.leave()
        if here.rank:
            return None
    step = int(read_manifest(work.checkpoint)["step"])
    return Evaluated(work.checkpoint, step, loss, targets, work.count, grid)


def _work(asked: Evaluation) -> _Work:
    checkpoint = checkpoint_of(asked.given, asked.best)
    job, source = job_of(asked.given, checkpoint, asked.model)
    if asked.data is None and not (asked.given / "settings.toml").is_file() and not job.data.sources:
        raise UserError(f"{asked.given} does not say on what to evaluate it: name a folder of tokens with --data")
    job = _placed(job, asked)
    if not devices.available(job.device):
        raise UserError(f"device = {job.device!r}: torch sees none here; use --device {devices.CPU}")
    if source.positions is not None and job.batch.sequence > source.positions:
        raise UserError(f"a sequence of {job.batch.sequence} is more than the {source.positions} that the model takes")
    model = skeleton(source)
    schedule = job.schedule.schedule(job.grid.pipe)
    plan_stages(model, source.cut(model), job.grid, job.batch, schedule, job.layout.rest(source))
    check_fits(checkpoint, {name: each.shape for name, each in model.named_parameters()})
    found = _samples(job, source, asked.data)
    return _Work(job, source, checkpoint, asked.data, _count(found, job, asked.batches))


def _placed(job: Job, asked: Evaluation) -> Job:
    """The job on the requested grid, without settings that do not affect the loss."""
    if asked.grid is not None and asked.grid != job.grid:
        job = replace(job, grid=asked.grid, schedule=ScheduleSettings())
    layout = job.layout
    plain = LayoutSettings(activations=layout.activations, weights=layout.weights, inputs=layout.inputs)
    least = len(portions(job.schedule.schedule(job.grid.pipe))) * job.grid.data * job.grid.z
    samples = -(-job.batch.samples // least) * least  # the loss does not depend on the batch
    batch = Batch(samples, job.batch.sequence if asked.sequence is None else asked.sequence)
    return replace(job, layout=plain, batch=batch, device=asked.device or job.device)


def _samples(job: Job, source: ModelSource, data: Path | None) -> Samples:
    if data is not None and source.naming.data != "tokens":
        job, data = replace(job, data=DataSettings(sources=(Source(folder=data),))), None
    if data is None:
        return samples_of(job, "validation")
    file, sequence = TokenFile(data), job.batch.sequence
    if source.vocabulary is not None and file.meta.vocabulary > source.vocabulary:
        raise UserError(
            f"{data} has a vocabulary of {file.meta.vocabulary}, and the model one of {source.vocabulary}: prepare it with "
            "the tokenizer that the model was trained with"
        )
    part = "validation" if file.meta.validation.tokens else "training"
    return replace(file.stream(sequence, part=part, packing=job.data.packing), shuffled=False)  # type: ignore[arg-type]


def _count(samples: Samples, job: Job, batches: int | None) -> int:
    """The number of samples to evaluate, each once."""
    wanted = None if batches is None else batches * job.batch.samples
    match samples:
        case Stream():
            have = samples.windows
        case Mixture():
            have = samples.longest
        case Images():
            size = job.batch.samples if samples.steps else 1  # without targets a batch cannot be padded
            have = samples.count // size * size
        case _:
            return wanted or job.evaluation.batches * job.batch.samples  # random samples are endless
    if wanted is not None and wanted > have:
        raise UserError(f"--batches {batches}: there are {have} samples, and a batch has {job.batch.samples}")
    return wanted or have


def _on_rank(work: _Work) -> tuple[float, int]:
    job = work.job
    network = Network(job.grid, devices.current(job.device), job.patience)
    pipeline = pipeline_of(job, work.source, network)
    load_weights(work.checkpoint, pipeline.parameters, None, network)
    share = job.grid.share(network.coordinates, job.batch.samples)
    samples = _samples(job, work.source, work.data)
    batches = _shares(samples, work.count, job.batch.samples, share)
    named = batches if getattr(samples, "as_forward", False) else map(work.source.naming, batches)
    placed = ({name: devices.put(each, network.device) for name, each in batch.items()} for batch in named)
    return mean_loss(pipeline, network, placed, work.source.naming.targets)


def _shares(samples: Samples, count: int, size: int, share: slice) -> Iterator[dict[str, Tensor]]:
    """A rank's part of each batch. The padding of the last batch does not count."""
    for begin in range(0, count, size):
        numbers = torch.arange(begin + share.start, begin + share.stop)
        batch = samples.batch(numbers.clamp(max=count - 1))
        if "targets" in batch:
            batch["targets"][numbers >= count] = IGNORED
        yield batch
