"""One rank of a training: builds a job's model, optimizer and data, and resumes them from the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from cubeloom.comm import Network, blames_others, devices
from cubeloom.comm.recorder import Waits
from cubeloom.models import ModelSource, skeleton
from cubeloom.parallel.fp8 import AMAX
from cubeloom.pipeline import Updates
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.recorded import GraphRecord
from cubeloom.train.checkpoint import (
    BEST,
    CheckpointWriter,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from cubeloom.train.clipping import norm_of, pieces, set_clip_and_skip
from cubeloom.train.data import Loader, Samples
from cubeloom.train.data.loader import read
from cubeloom.train.decision import Decision, decide
from cubeloom.train.evaluation import mean_loss
from cubeloom.train.guard import Guard
from cubeloom.train.job import Job
from cubeloom.train.job.samples import samples_of
from cubeloom.train.optimizers import optimizer_of
from cubeloom.train.sharded_optimizer import ShardedOptimizer
from cubeloom.train.step_times import StepTimes


@dataclass(frozen=True)
class StepResult:
    """The result of one step. Losses and norms are those of the whole batch and the whole model, on every rank."""

    loss: float
    norm: float | None  # None if weights are updated within the step
    rate: float
    skipped: str | None
    times: StepTimes
    waits: Waits


@dataclass(frozen=True)
class PendingStep:
    """A step that was launched on the device; losses and norms stay there."""

    loss: Tensor
    norm: Tensor | None
    rate: float
    times: StepTimes
    waits: Waits


class Trainer:
    """`step` trains on the next batch. All ranks call methods in the same order."""

    def __init__(self, job: Job, network: Network, decision: Decision | None = None) -> None:
        """Starts from what rank 0 decided; by default it decides here."""
        self.job = job
        self.network = network
        self._rate = job.learning_rate
        self._source = job.source()
        self._naming: Callable[[dict[str, Tensor]], dict[str, Tensor]] = self._source.naming
        self.pipeline = pipeline_of(job, self._source, network)
        self.parameters = self.pipeline.parameters
        gradients = self.pipeline.gradients
        self.optimizer = optimizer_of(job.optimizer, self.parameters, gradients, network, job.given_optimizer)
        self._share = job.grid.share(network.coordinates, job.batch.samples)
        self.done, progress = self._take_up(decision or decide(job, network.host_group))
        if self.pipeline.amax is not None:
            self.pipeline.amax.load(progress.get(AMAX, {}))
        # The best validation loss, and how many evaluations since were no better.
        self._best: list[float] = progress.get("best", [])
        self.best_step: int | None = progress.get(BEST)
        """The number of steps before the best evaluation, if there was any."""
        self._guard = Guard(job.guard, progress.get("norms", ()))
        samples = samples_of(job, "training", progress.get("stream"))
        if getattr(samples, "as_forward", False):
            self._naming = dict
        self._loader = Loader(samples, job.batch.samples, self._share, progress.get("position", 0))
        self._writer = CheckpointWriter(job.checkpoints, network, job.checkpoint.keep)

    def _take_up(self, decision: Decision) -> tuple[int, dict[str, Any]]:
        """Load the weights; return the number of completed steps, and the stored progress."""
        if decision.checkpoint is not None:
            return load_checkpoint(decision.checkpoint, self.parameters, self.optimizer, self.network)
        if decision.start is not None:
            load_weights(decision.start, self.parameters, self.optimizer, self.network)
        return 0, {}

    def step(self) -> StepResult:
        under_way = self.launch()
        devices.settle(self.network.device)
        norm = None if under_way.norm is None else under_way.norm.item()
        skipped = None if norm is None else self._guard.objection(norm)
        self.done += 1
        return StepResult(under_way.loss.item(), norm, under_way.rate, skipped, under_way.times, under_way.waits)

    def launch(self) -> PendingStep:
        """Launch all computation of a step. On a GPU the host does not wait. `step` reads the result and counts the
        step.
        """
        data = self._given(next(self._loader))
        rate = self._rate(self.done)
        for group in self.optimizer.optimizer.param_groups:
            group["lr"] = rate
        times = StepTimes(self.network.device)
        norm = None
        with self.network.waiting() as waits:
            if self.pipeline.schedule.updates is Updates.FLUSH:
                loss = self.pipeline.launch(data, self.done, observer=times)
                norm = self._update()
            else:
                loss = self.pipeline.launch(data, self.done, self._update_within, times)
        return PendingStep(loss, norm, rate, times, waits)

    def _update(self) -> Tensor:
        """Update, unless the guard objects, which the device decides; return the norm of the gradients."""
        sharded = self.optimizer if isinstance(self.optimizer, ShardedOptimizer) else None
        found = pieces(self.parameters.items(), self.network, sharded, self.pipeline.layout.holders)
        size = norm_of(found, self.network)
        if set_clip_and_skip(self.optimizer.optimizer, found, size, self.job.optimizer.clip, self._guard.limit):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return size

    def _update_within(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @cached_property
    def _validation(self) -> Samples:
        return samples_of(self.job, "validation")

    def evaluate(self) -> float:
        """The mean loss of the first batches of the validation data."""
        samples, size = self._validation, self.job.batch.samples
        shares = (read(samples, number * size, self._share) for number in range(self.job.evaluation.batches))
        return mean_loss(self.pipeline, self.network, map(self._given, shares), self._source.naming.targets)[0]

    def judge(self, loss: float) -> bool:
        """Record a validation loss; return whether enough in a row were no better than the best."""
        best, worse = self._best or [float("inf"), 0]
        self._best = [loss, 0] if loss < best else [best, worse + 1]
        if loss < best:
            self.best_step = self.done
        patience = self.job.evaluation.patience
        return patience is not None and self._best[1] >= patience

    def save(self) -> None:
        progress = {
            **self._loader.progress,
            "norms": list(self._guard.norms),
            "best": self._best,
            BEST: self.best_step,
            "model": self._source.describe(),
        }
        if self.pipeline.amax is not None:
            progress[AMAX] = self.pipeline.amax.state()
        best = self.best_step if self.job.checkpoint.best else None
        if self.job.checkpoint.asynchronous:
            self._writer.save(self.done, self.parameters, self.optimizer, progress, best)
        else:
            save_checkpoint(
                self.job.checkpoints,
                self.done,
                self.parameters,
                self.optimizer,
                self.network,
                progress,
                self.job.checkpoint.keep,
                best,
            )

    @property
    def waited(self) -> float:
        """Total seconds that steps have waited for their data."""
        return self._loader.waited

    def close(self, failure: BaseException | None = None) -> None:
        """Finish the checkpoint being written, unless the training failed because another rank is gone."""
        self._loader.close()
        if failure is None or not blames_others(failure):
            self._writer.wait()

    def _given(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model's inputs: on the device, with the names of its forward."""
        return {name: devices.put(tensor, self.network.device) for name, tensor in self._naming(data).items()}


def pipeline_of(job: Job, source: ModelSource, network: Network) -> Pipeline:
    """The job's model on its grid."""
    model = skeleton(source)
    return Pipeline(
        model,
        source.cut(model),
        network,
        job.batch,
        source.fill(model, job.seed, job.numbers, network.device),
        job.schedule.schedule(job.grid.pipe),
        job.layout.rest(source),
        recompute=job.layout.recomputation,
        ways=job.layout.ways,
        compile=job.layout.compile,
        record=GraphRecord() if job.layout.record else None,
        seed=job.seed,
    )
