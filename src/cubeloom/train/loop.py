"""The training loop, on one rank of a job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from cubeloom.base.errors import counted
from cubeloom.comm import HostGroup, Network, devices
from cubeloom.launch.stop import Stop
from cubeloom.train.changes import changes_since
from cubeloom.train.decision import Decision, decide
from cubeloom.train.job import Job
from cubeloom.train.metrics_logger import MetricsLogger, metrics_logger
from cubeloom.train.run_lock import locked
from cubeloom.train.run_metadata import write_run_metadata
from cubeloom.train.trainer import StepResult, Trainer

_WARM = 3  # the timeline is drawn after this many steps, because the first ones are slower


@dataclass(frozen=True)
class Ended:
    steps: int
    why: Literal["done", "early stop", "asked to stop"]
    loss: float | None  # of the last step
    asked: tuple[str, ...] = ()
    """The ranks that were asked to stop."""


Callback = Callable[[int, StepResult, Trainer], Mapping[str, float] | None]
"""Called on every rank after each step, with its number, its result and the trainer. The metrics it returns are written
down.

Rank 0's metrics are kept. A callback may read parameters, and may communicate if all ranks do.
"""


def train(
    job: Job,
    restart: int = 0,
    num_comm_channels: int = 1,
    stop: Stop | None = None,
    callbacks: Sequence[Callback] = (),
    network: Network | None = None,
) -> Ended:
    """Train until the last step, until validation stops improving, or until a signal asks to stop.

    Resumes from the newest checkpoint in the job's folder that rank 0 sees. `restart`: how often rank 0's launcher
    restarted the job. Large collectives are split over `num_comm_channels` communicators, unless the job sets this.
    `stop` reports signals; by default from now on. If no step is left to train, no file changes.
    """
    if job.deterministic:
        devices.repeat_exactly()
    with ExitStack() as stack:
        stop = stop or stack.enter_context(Stop())
        host_group = HostGroup(job.patience) if network is None else network.host_group
        decision = decide(job, host_group, restart)
        if decision.step >= job.steps:
            return nothing_to_train(decision.step, host_group.rank == 0)
        network = network or Network(
            job.grid,
            devices.current(job.device),
            job.patience,
            num_comm_channels=job.num_comm_channels or num_comm_channels,
            host_group=host_group,
        )
        with locked(job.folder, network):
            trainer = Trainer(job, network, decision)
            # Asked to stop while weights were loaded: there is nothing to save.
            if asked := _asked(network, stop):
                trainer.close()
                return Ended(trainer.done, "asked to stop", None, asked)
            changes: dict[str, str] = {}
            if network.rank == 0:
                changes = changes_since(job) if decision.checkpoint is not None else {}
                write_run_metadata(job)  # only now: the job may have been refused because of what the folder has
            return _train(trainer, stop, decision, changes, callbacks)


def nothing_to_train(done: int, say: bool = True) -> Ended:
    if say:
        sys.stderr.write(f"{counted(done, 'step')} done before: nothing to train\n")
    return Ended(done, "done", None)


def _train(
    trainer: Trainer, stop: Stop, decision: Decision, changes: Mapping[str, str], callbacks: Sequence[Callback]
) -> Ended:
    job, network = trainer.job, trainer.network
    with metrics_logger(trainer) as logger:
        processes = network.host_group.gather(os.getpid())
        going_on = trainer.done or decision.attempt > 1
        begin, words = ("resume", f"resuming at step {trainer.done}") if going_on else ("start", "")
        logger.event(
            begin,
            words,
            step=trainer.done,
            attempt=decision.attempt,
            restart=decision.restart,
            grid=str(job.grid),
            settings=decision.settings_hash,
            processes=processes,
        )
        if changes:
            logger.event("change", f"changed since: {_listed(changes)}", step=trainer.done, **changes)
        try:
            ended = _steps(job, trainer, stop, logger, callbacks)
        except BaseException as failure:
            trainer.close(failure)
            raise
        trainer.close()
        logger.event(ended.why, _last_words(ended, job), step=ended.steps)
    return ended


def _listed(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {change}" for name, change in changes.items())


def _steps(job: Job, trainer: Trainer, stop: Stop, logger: MetricsLogger, callbacks: Sequence[Callback] = ()) -> Ended:
    loss: float | None = None
    first = trainer.done
    while trainer.done < job.steps:
        step, began = trainer.done, time.perf_counter()
        stepped = trainer.step()
        seconds = time.perf_counter() - began  # of the step alone, without validation and checkpoints
        loss = stepped.loss
        validation, enough = _evaluate(job, trainer)
        own = {name: float(value) for each in callbacks for name, value in (each(step, stepped, trainer) or {}).items()}
        asked = logger.write(step, stepped, seconds, stop.asked, validation, own)
        _mention(stepped, step, logger)
        last = trainer.done == job.steps
        if last or step == first + _WARM:
            logger.draw(step, stepped)
        best = validation is not None and trainer.best_step == trainer.done
        if asked or enough or last or trainer.done % job.checkpoint.every == 0 or (best and job.checkpoint.best):
            trainer.save()
            logger.event("checkpoint", step=trainer.done)
        if best:
            logger.event("best", step=trainer.done, validation=validation)
        if asked or enough:
            why: Literal["asked to stop", "early stop"] = "asked to stop" if asked else "early stop"
            return Ended(trainer.done, why, loss, _asked(trainer.network, stop))
    return Ended(trainer.done, "done", loss)


def _asked(network: Network, stop: Stop) -> tuple[str, ...]:
    host_group = network.host_group
    return tuple(name for name, asked in host_group.gather((host_group.name, stop.asked)) if asked)


def _evaluate(job: Job, trainer: Trainer) -> tuple[float | None, bool]:
    """The validation loss, if an evaluation is due, and whether to stop."""
    every = job.evaluation.every
    if every is None or (trainer.done % every and trainer.done < job.steps):
        return None, False
    loss = trainer.evaluate()
    return loss, trainer.judge(loss)


def _mention(stepped: StepResult, step: int, logger: MetricsLogger) -> None:
    if stepped.skipped is not None:
        logger.event("skip", step=step, why=stepped.skipped)


def _last_words(ended: Ended, job: Job) -> str:
    steps = counted(ended.steps, "step")
    match ended.why:
        case "done":
            return f"{steps} done; {job.folder / 'report.html'} shows {'it' if ended.steps == 1 else 'them'}"
        case "early stop":
            times = counted(job.evaluation.patience or 0, "time")
            return f"stopped after {steps}: validation got no better {times} in a row"
    return f"asked to stop after {steps}, kept in {job.checkpoints}; the same command resumes"
