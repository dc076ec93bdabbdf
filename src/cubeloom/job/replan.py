"""Another grid for a job, when there are other ranks than the ones it was made for."""

from __future__ import annotations

from dataclasses import replace

from cubeloom.cube import Cut
from cubeloom.cube.resolve import forms, problems
from cubeloom.errors import UserError
from cubeloom.grid import AXES, Grid, grids
from cubeloom.job.job import Job
from cubeloom.limits import RANKS, within
from cubeloom.models import Model, cut_of
from cubeloom.runtime.volume import pipeline_volume


def replan(job: Job, ranks: int) -> Job:
    """The job on at most so many ranks: on as many as can be used, and of those grids on the one that moves fewest bytes.

    Model, batch and schedule stay, so that the same training goes on. A job that fits exactly is left alone.
    """
    within("--ranks", ranks, most=RANKS)
    if job.grid.world == ranks:
        return job
    model = job.skeleton()
    cut = cut_of(model)
    for count in range(ranks, 0, -1):
        some = (grid for grid in grids(count, AXES) if _divides(job, model, cut, grid))
        found = [fitted for grid in some if (fitted := _fitted(job, grid)) is not None]
        if found:
            return min(found, key=_bytes)
    raise UserError(f"the job fits on no grid of {ranks} ranks or fewer")


def _divides(job: Job, model: Model, cut: Cut, grid: Grid) -> bool:
    """Whether samples, pieces and layers can be cut so at all: most cannot, and a refusal that looks for advice takes long."""
    if job.batch.samples % (grid.data * grid.z) or grid.pipe > len(model.pieces()):
        return False
    return not any(problems(forms(model, cut, grid, job.layout.rest), grid, job.batch))


def _fitted(job: Job, grid: Grid) -> Job | None:
    """The job on this grid, with its schedule if that runs there, else with the one that always does."""
    placed = replace(grid, placement=job.grid.placement)
    for schedule in (job.schedule, replace(job.schedule, name="1f1b", pairs=None, mode=None)):
        fitted = replace(job, grid=placed, schedule=schedule)
        try:
            fitted.laid_out()
        except UserError:
            continue
        return fitted
    return None


def _bytes(job: Job) -> float:
    """Of the first rank in a step."""
    volume = pipeline_volume(job.laid_out(), job.grid, job.batch, job.numbers.itemsize, 0)
    return float(sum(volume.values()))
