"""Finds another grid for a job when there are more or fewer ranks than the job was made for."""

from __future__ import annotations

from dataclasses import replace

from cubeloom.base.errors import UserError
from cubeloom.base.grid import AXES, Grid, grids
from cubeloom.base.limits import RANKS, within
from cubeloom.models import skeleton
from cubeloom.parallel import Batch, ParallelConfig
from cubeloom.parallel.cut import CutError
from cubeloom.parallel.layers.declared import FoundCut
from cubeloom.parallel.resolution import problems, resolve, specs_of
from cubeloom.pipeline.runtime.microbatches import portions
from cubeloom.pipeline.runtime.model_pieces import ModelPieces
from cubeloom.train.job.job import Job


def replan(job: Job, ranks: int) -> Job:
    """The job on at most this many ranks: on as many as can be used, and of those grids on the one that moves fewest
    bytes.

    Model, batch and schedule stay, so that the same training continues. A job that fits exactly is not changed.
    """
    within("--ranks", ranks, most=RANKS)
    if job.grid.world == ranks:
        return job
    fits = _Fits(job)
    for count in range(ranks, 0, -1):
        some = (grid for grid in grids(count, AXES) if fits(grid, job.batch.samples))
        found = [fitted for grid in some if (fitted := _fitted(job, grid, fits)) is not None]
        if found:
            return min(found, key=_bytes)
    raise UserError(f"the job fits on no grid of {ranks} ranks or fewer")


class _Fits:
    """Whether these samples, pieces and layers can be cut by a grid. Most grids cannot; answers are cached."""

    def __init__(self, job: Job) -> None:
        self._job = job
        source = job.source()
        self._model = skeleton(source)
        self._cut = source.cut(self._model)
        self._specs = None if isinstance(self._cut, FoundCut) else specs_of(self._model, self._cut)
        self._pieces = len(ModelPieces.of(self._model, self._cut, Grid(), job.batch, self._specs or []).modules)
        self._known: dict[tuple[Grid, int], bool] = {}

    def __call__(self, grid: Grid, samples: int) -> bool:
        if grid.pipe > self._pieces or samples % (grid.data * grid.z):
            return False
        # An axis that cannot cut alone cannot with others. There are few such axes, and many grids.
        alone = (Grid(x=grid.x), Grid(y=grid.y), Grid(z=grid.z))
        return all(self._cuts(each, samples) for each in (*alone, replace(grid, pipe=1)))

    def _cuts(self, cube: Grid, samples: int) -> bool:
        if (cube, samples) not in self._known:
            batch = Batch(samples, self._job.batch.sequence)
            try:
                specs = self._specs or resolve(self._model, self._cut, cube, self._job.rest, batch)
                self._known[cube, samples] = not any(problems(specs, cube, self._job.rest, batch))
            except CutError:
                self._known[cube, samples] = False
        return self._known[cube, samples]


def _fitted(job: Job, grid: Grid, fits: _Fits) -> Job | None:
    """The job on this grid, with its own schedule if that runs there, otherwise with one that always does."""
    placed = replace(grid, placement=job.grid.placement)
    for schedule in (job.schedule, replace(job.schedule, name="1f1b", pairs=None, mode=None)):
        fitted = replace(job, grid=placed, schedule=schedule)
        try:
            parts = len(portions(schedule.schedule(grid.pipe))) * job.layout.ways
            if job.batch.samples % parts or not fits(grid, job.batch.samples // parts):
                continue
            fitted.laid_out()
        except UserError:
            continue
        return fitted
    return None


def _bytes(job: Job) -> float:
    """Bytes that the first rank receives in a step."""
    config = ParallelConfig.exact(job.grid, job.rest, job.batch, job.numbers.itemsize)
    volume = job.laid_out().volume(config, worker=0, zero=job.optimizer.shard_optimizer_state)
    return float(sum(volume.values()))
