"""Starts a training: as a rank of the job that this process belongs to, or as the agent that starts ranks on this
machine.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from typing import NoReturn

from cubeloom.base.errors import UserError, counted
from cubeloom.base.file_errors import FilesFailed
from cubeloom.base.host import name_of_rank
from cubeloom.comm import blames_others, devices, world
from cubeloom.launch import elastic
from cubeloom.launch.environment import Membership, current, membership
from cubeloom.launch.minder import Minder
from cubeloom.launch.ready import check_startable, join, make_ready, tell_where_on_signal
from cubeloom.launch.share_gpu import sharing
from cubeloom.launch.stop import Stop
from cubeloom.train.checkpoint import newest, read_manifest
from cubeloom.train.decision import check_begin
from cubeloom.train.job import Job, check
from cubeloom.train.loop import Ended, nothing_to_train, train
from cubeloom.train.metrics import check_sinks
from cubeloom.train.run_lock import check_unlocked


def begin(job: Job, spare: bool = False, share_gpu: bool = False) -> Ended | None:
    """Train the job. Every check that can be made before a process starts or a file is written is made before.

    `spare`: in a job with more ranks than the grid has, the remaining ranks do nothing and get None. `share_gpu`: ranks
    started here may be more than the machine's GPUs.
    """
    tell_where_on_signal()
    check(job)
    check_sinks(job.metrics)
    here = membership(current())
    if here is None:
        check_begin(job)  # otherwise rank 0 does this
        check_startable(job.grid.world)
        have = devices.count(job.device)
        if job.device != devices.CPU and job.grid.world > have and not share_gpu:
            raise UserError(
                f"the grid {job.grid} has {counted(job.grid.world, 'rank')}, and this machine {counted(have, 'GPU')}; "
                "--share-gpu lets them share"
            )
        if (done := _steps_done(job)) >= job.steps:
            return nothing_to_train(done)
        check_unlocked(job.folder)
        with sharing(job.grid.world, job.device):
            found = elastic.start(job.grid.world, job.restarts, _rank_of_agent, job)
        ended: Ended = found[0]
        return ended
    if spare and here.rank >= job.grid.world:
        return None
    if spare and here.world > job.grid.world:
        here = replace(here, world=job.grid.world)
    if here.world != job.grid.world:
        if here.rank:  # rank 0 says it for all
            _end(2)
        raise UserError(
            f"the grid {job.grid} needs {counted(job.grid.world, 'rank')}, and {here.by} started {here.world}; "
            f"change the grid, start {job.grid.world}, or let --replan choose"
        )
    return _rank_of_launcher(job, here)


def _steps_done(job: Job) -> int:
    found = newest(job.folder)
    return 0 if found is None else int(read_manifest(found)["step"])


def _rank_of_launcher(job: Job, here: Membership) -> Ended:
    """A process that torchrun, srun or another launcher started."""
    try:
        # An agent may be killed. Other launchers end their ranks themselves, or there is no agent.
        return _join_and_train(job, here, num_comm_channels=1, agent=os.getppid() if here.agent else None)
    except UserError as error:
        sys.stderr.write(f"cubeloom: {error}\n")
        _end(2)
    except Exception as error:
        _tell(here, error)
        if not (blames_others(error) or isinstance(error, FilesFailed)):  # otherwise a traceback adds nothing
            traceback.print_exc()
        _end(1)


def _end(code: int) -> NoReturn:
    """At once: when Python ends normally it destroys process groups, and waits for ranks that are gone or stopped."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _rank_of_agent(refusals: elastic.Refusals, job: Job) -> Ended:
    """A process that our own agent started."""
    tell_where_on_signal()
    elastic.refused(refusals)
    here = membership(current())
    assert here is not None
    make_ready(here.local_rank, job.device, here.world)
    try:
        # All ranks are on this machine.
        ended = _join_and_train(job, here, devices.num_comm_channels(job.device, here.world))
    except UserError as error:
        elastic.refuse(refusals, error)
        _end(2)
    except Exception as error:
        _tell(here, error)
        _end(1)
    if ended.why == "asked to stop":
        elastic.stop(refusals)
    return ended


def _tell(here: Membership, error: Exception) -> None:
    """One line, because all ranks may fail."""
    what = f"{type(error).__name__}: {error}".splitlines()[0]  # some errors have no message
    sys.stderr.write(f"{name_of_rank(here.rank, here.world)}: {what}\n")


def _join_and_train(job: Job, here: Membership, num_comm_channels: int, agent: int | None = None) -> Ended:
    name = name_of_rank(here.rank, here.world)
    with Minder(name, job.grace, agent):
        join(here, job.device, job.patience)  # a SIGTERM here ends the process: there is nothing to save
        with Stop() as stop:
            ended = train(job, here.restart, num_comm_channels, stop)
            if agent is not None and ended.asked:  # with several machines each should say why it ended
                sys.stderr.write(
                    f"{name}: stopped after {counted(ended.steps, 'step')}: {ended.asked[0]} was asked to\n"
                )
            world.leave()
        return ended
