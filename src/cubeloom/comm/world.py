"""Coming together: the process group that a job's ranks share before any grid is laid over it."""

from __future__ import annotations

import gc
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed.tensor import debug

from cubeloom.comm.devices import BACKENDS, Kind
from cubeloom.comm.failure import failed

LOCAL = "127.0.0.1"


def host() -> TCPStore:
    """A meeting point on this machine, at a port that the system picks, so that two never meet."""
    return TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)


def visit(port: int, address: str = LOCAL, timeout: float = 300) -> TCPStore:
    """The meeting point at this port, seen from a rank; raises CommunicationError where nobody answers for so long."""
    try:
        limit = timedelta(seconds=timeout)
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise failed(f"meeting the other ranks at {address}:{port}", error) from error


def join(store: Store, job: str, rank: int, world: int, kind: Kind, timeout: float) -> None:
    """Become a rank of the job of this name."""
    dist.init_process_group(
        BACKENDS[kind],
        store=PrefixStore(job, store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )


def join_by_environment(kind: Kind, timeout: float) -> None:
    """Become the rank that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say."""
    dist.init_process_group(BACKENDS[kind], init_method="env://", timeout=timedelta(seconds=timeout))


def barrier() -> None:
    """Wait for all ranks of the job. NCCL must be told on which device, or it guesses, and warns that it does."""
    on_gpu = dist.get_backend() == BACKENDS["cuda"]
    dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)


def leave() -> None:
    barrier()  # nobody leaves while another still needs its connection
    dist.destroy_process_group()
    forget()


def forget() -> None:
    """Let go of the groups of a job that is over."""
    # A gloo group has threads that wake a hundred times a second until the last reference to it is gone. Networks are
    # cycles, and distributed tensors remember the meshes they were ever on: forget both.
    getattr(debug, "_clear_sharding_prop_cache", gc.collect)()  # torch 2.11 may not have it
    gc.collect()
