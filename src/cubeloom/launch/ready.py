"""Prepares a process to be a rank."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys

import torch

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.base.host import cores
from cubeloom.base.limits import PROCESSES, PROCESSES_A_CORE
from cubeloom.comm import devices, world
from cubeloom.comm.attempt import name_attempt
from cubeloom.comm.meeting import LEAST
from cubeloom.launch.environment import Membership

# Forked ranks have these in memory already; torch imports its compiler when the first distributed tensor is made.
PRELOAD = [
    "cubeloom.launch.pool",
    "cubeloom.models.our_model",
    "cubeloom.models.hugging_face",
    torch_private.COMPILER,
    torch_private.LAYOUT_CACHES,
]


def preload() -> list[str]:
    """And what this process has imported of Cubeloom, besides its commands, and of Hugging Face's models.

    A job uses what its caller does. The server imports it once; otherwise each rank would, for up to seconds.
    """
    ours = (name for name in sys.modules if name.startswith("cubeloom.") and not name.startswith("cubeloom.cli"))
    theirs = (name for name in sys.modules if name.startswith("transformers.") and ".modeling_" in name)
    return [*dict.fromkeys((*PRELOAD, *ours, *theirs))]


def check_startable(ranks: int) -> None:
    """Raises UserError if this machine cannot start that many processes."""
    most = min(PROCESSES, PROCESSES_A_CORE * cores())
    if ranks > most:
        raise UserError(
            f"{ranks:,} ranks are more than this machine can start, which is {most:,}; `cubeloom rehearse` runs the "
            "distinct ones of any number, one after the other"
        )


def tell_where_on_signal() -> None:
    """From now on `kill -USR2` makes this process print where each of its threads is, even if it waits in C++."""
    faulthandler.register(signal.SIGUSR2)


def make_ready(local_rank: int, device: devices.Kind, ranks: int) -> None:
    """Set up threads, memory, sockets and device of one of `ranks` ranks, all on this machine."""
    torch.set_num_threads(1)
    gc.freeze()  # forked objects are never garbage: scanning them would take a tenth of a second each time
    os.environ.update(devices.wiring(device, local_rank, shared=ranks > devices.count(device)))
    devices.use(device, local_rank)


def join(here: Membership, device: devices.Kind, timeout: float) -> None:
    """Join the job of this process's launcher."""
    devices.use(device, here.local_rank)
    alone = here.one_machine or world.is_local(here.address)
    if alone:
        for name, value in devices.wiring(device, here.local_rank, shared=False).items():
            os.environ.setdefault(name, value)  # a value that the user set takes precedence
    if here.hosted:
        longest = max(timeout, LEAST)
        store = world.visit(here.port, here.address, longest)
        attempt = name_attempt(store, here.rank, here.world, longest)
        world.join(store, attempt, here.rank, here.world, device, timeout)
        return
    if alone:
        store = world.host(here.port) if here.rank == 0 else world.visit(here.port)
        world.join(store, "job", here.rank, here.world, device, timeout)
        return
    os.environ.update(
        RANK=str(here.rank), WORLD_SIZE=str(here.world), MASTER_ADDR=here.address, MASTER_PORT=str(here.port)
    )
    world.join_by_environment(device, timeout)
