"""Beginning a training: as a rank of the job that is there, or as the agent that starts its ranks on this machine."""

from __future__ import annotations

import sys
from dataclasses import replace

from cubeloom.comm import devices, world
from cubeloom.errors import UserError, counted
from cubeloom.job import Job, check
from cubeloom.launch import elastic
from cubeloom.launch.environment import Membership, current, membership
from cubeloom.launch.ready import check_startable, join, make_ready, tell_where_on_signal
from cubeloom.launch.share_gpu import sharing
from cubeloom.metrics import check_sinks
from cubeloom.train.checkpoint import check_fits, newest
from cubeloom.train.claim import check_unclaimed
from cubeloom.train.loop import Ended, train
from cubeloom.train.optimizers import KINDS


def begin(job: Job, spare: bool = False, share_gpu: bool = False) -> Ended | None:
    """Train the job; everything that can be refused is, before a process starts or a file is written.

    `spare`: in a job with more ranks than the grid has, those beyond do nothing, and get None. `share_gpu`: where this starts
    the ranks, they may be more than the machine's GPUs.
    """
    tell_where_on_signal()
    check(job)
    check_sinks(job.metrics)
    _check_begin(job)
    here = membership(current())
    if here is None:
        check_startable(job.grid.world)
        have = devices.count(job.device)
        if job.device != devices.CPU and job.grid.world > have and not share_gpu:
            raise UserError(
                f"the grid {job.grid} has {counted(job.grid.world, 'rank')}, and this machine {counted(have, 'GPU')}; "
                "--share-gpu lets them share"
            )
        check_unclaimed(job.folder)
        with sharing(job.grid.world, job.device):
            found = elastic.start(job.grid.world, job.restarts, _rank_of_agent, job)
        ended: Ended = found[0]
        return ended
    if spare and here.rank >= job.grid.world:
        return None
    if spare and here.world > job.grid.world:
        here = replace(here, world=job.grid.world)
    if here.world != job.grid.world:
        raise UserError(
            f"the grid {job.grid} needs {counted(job.grid.world, 'rank')}, and {here.by} started {here.world}; "
            f"change the grid, start {job.grid.world}, or let --replan choose"
        )
    return _join_and_train(job, here, lanes=1)


def _check_begin(job: Job) -> None:
    """That what the job goes on from, or begins with, is of its model."""
    shapes = {name: parameter.shape for name, parameter in job.skeleton().named_parameters()}
    found, start = newest(job.folder), job.model.start
    if found is not None:
        check_fits(found, shapes, KINDS[job.optimizer.name].__name__)
    elif start is not None:
        check_fits(newest(start) or start, shapes)


def _rank_of_agent(refusals: elastic.Refusals, job: Job) -> Ended:
    """The life of a process that the agent started."""
    tell_where_on_signal()
    elastic.refused(refusals)
    here = membership(current())
    assert here is not None
    make_ready(here.local_rank, job.device, here.world)
    try:
        # All ranks are of this machine.
        ended = _join_and_train(job, here, devices.lanes(job.device, here.world))
    except UserError as error:
        elastic.refuse(refusals, error)
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]  # some have no words
        sys.stderr.write(f"rank {here.rank} of {here.world}: {what}\n")
        raise
    if ended.why == "asked to stop":
        elastic.stop(refusals)
    return ended


def _join_and_train(job: Job, here: Membership, lanes: int) -> Ended:
    join(here, job.device, job.patience)
    ended = train(job, here.restart, lanes)
    world.leave()
    return ended
