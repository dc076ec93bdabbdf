"""All checks of a job that are possible before a process starts."""

from __future__ import annotations

import os
from pathlib import Path

from cubeloom.base.errors import UserError
from cubeloom.comm import devices
from cubeloom.pipeline import Updates
from cubeloom.pipeline.runtime.recorded import check_recordable
from cubeloom.train.job.job import Job
from cubeloom.train.job.samples import check_samples, check_validation, samples_of
from cubeloom.train.optimizers import check_elementwise


def check(job: Job, device_here: bool = True) -> None:
    """Raises UserError; changes nothing. `device_here`: also check that this machine has the job's device."""
    if device_here and not devices.available(job.device):
        raise UserError(f"device = {job.device!r}: torch sees none here; use device = {devices.CPU!r}")
    layout = job.laid_out()
    job.learning_rate(0)
    samples_of(job, "training")
    check_samples(job)
    check_elementwise(job.optimizer, job.given_optimizer)
    if job.evaluation.every is not None:
        check_validation(job)
    if layout.schedule.updates is not Updates.FLUSH and (job.optimizer.shard_optimizer_state or job.optimizer.clip > 0):
        raise UserError(
            f"schedule.name = {job.schedule.name!r} updates weights within a step: it takes no"
            " optimizer.shard_optimizer_state, and optimizer.clip = 0, since there is no gradient of a whole step"
        )
    if (job.optimizer.name, job.dtype, job.device) == (
        "sgd",
        "bfloat16",
        devices.CPU,
    ) and not job.optimizer.fp32_master_weights:
        raise UserError(
            "optimizer.fp32_master_weights = false: torch's sgd on a CPU does not update weights of bfloat16 (its issue "
            "191763); leave it out, or use optimizer.name = 'adamw'"
        )
    if job.layout.record:
        if job.device == devices.CPU:
            raise UserError(
                "layout.record = true: stages are recorded on a GPU only; use device = 'cuda', or leave it out"
            )
        recomputes = job.layout.recompute != "none"
        check_recordable(layout.specs, layout.schedule, job.layout.ways, recomputes)
    _check_folder(job.folder)


def _check_folder(folder: Path) -> None:
    """Check that the run's folder can be written."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"folder = {str(folder)!r}: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"folder = {str(folder)!r}: {existing} cannot be written to")
