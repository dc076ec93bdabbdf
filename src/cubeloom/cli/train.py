"""`cubeloom train`: from a settings file to a trained model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cubeloom.base.errors import UserError
from cubeloom.base.settings import load, write
from cubeloom.comm.kinds import CPU
from cubeloom.launch.environment import current, membership
from cubeloom.launch.slurm import INTERRUPTED
from cubeloom.train.job.announce import announced
from cubeloom.train.job.job import Job


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train what a settings file says, on the ranks that torchrun, srun or a Kubernetes job started, or on this machine.

    Every setting is also an option: `--a.b c`, or `--a.b=c`. An existing run is resumed from its last checkpoint. Exits
    0 if training ended well, 1 if it failed, 2 if the request is invalid, 75 if a signal stopped it: the same command
    then resumes it.
    """

    file: tyro.conf.Positional[Path]
    """TOML; or a Python recipe (.py), which is executed. `cubeloom init` writes one."""
    replan: bool = False
    """If the number of ranks differs from the grid's, continue with the best grid for them."""
    ranks: int | None = None
    """The number of ranks, for --replan; by default those that were started, or this machine's GPUs. On the CPU, or if
    ranks share a GPU, the default is the grid's number.
    """
    cluster: str | None = None
    """The cluster, for --replan: the planner then chooses grid, schedule and layout. A known cluster, or a TOML file
    that `cubeloom calibrate` wrote. By default only the grid is chosen, by the bytes that it moves.
    """
    share_gpu: bool = False
    """Let several ranks of this machine share a GPU: up to four in parallel, if CUDA's MPS is installed, otherwise in
    turns.
    """
    print_settings: bool = False
    """Print the resolved settings, and do nothing else."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        job = load(Job, self.file, self.overrides)
        if not self.replan and (self.ranks is not None or self.cluster is not None):
            raise UserError("--ranks and --cluster are for --replan: the grid says how many ranks there are")
        if self.replan:
            job = self._replanned(job)
        if self.print_settings:
            print(write(job), end="")
            return 0
        here = membership(current())
        first = here is None or here.rank == 0
        if first:
            print(announced(job), file=sys.stderr, flush=True)
        return self._train(job, first)

    def _train(self, job: Job, first: bool) -> int:
        # Importing torch takes seconds: the user has already read what is going to happen.
        from cubeloom.launch.elastic import Interrupted, JobFailed
        from cubeloom.train.start import begin

        try:
            ended = begin(job, self.replan, self.share_gpu)
        except Interrupted:
            return INTERRUPTED
        except JobFailed as error:
            raise SystemExit(f"cubeloom: {error}") from None
        if ended is not None and self.json and first:
            print(json.dumps({**asdict(ended), "folder": str(job.folder), "grid": job.grid.sizes}))
        return INTERRUPTED if ended is not None and ended.why == "asked to stop" else 0

    def _replanned(self, job: Job) -> Job:
        from cubeloom.train.job.replan import replan

        ranks = self._ranks(job)
        if self.cluster is None or ranks == job.grid.world:
            return replan(job, ranks)
        from cubeloom.tools.rehearse.plans import planned  # imported only if needed

        return planned(job, self.cluster, ranks)

    def _ranks(self, job: Job) -> int:
        if self.ranks is not None:
            return self.ranks
        here = membership(current())
        if here is not None:
            return here.world
        if job.device == CPU or self.share_gpu:
            return job.grid.world
        from cubeloom.comm import devices

        # Without GPUs the job stays unchanged, and is refused for that reason.
        return devices.count(job.device) or job.grid.world
