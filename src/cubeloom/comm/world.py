"""Joins the default process group of a job's ranks, before a grid is created on it."""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined] # documented; torch's types hide it
from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError, first_line
from cubeloom.comm.devices import BACKENDS, Kind
from cubeloom.comm.failure import failed

LOCAL = "127.0.0.1"


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address, so that all ranks that meet there are on this machine."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def host(port: int = 0, address: str = LOCAL) -> TCPStore:
    """A store at this address of this machine, at a free port that the system chooses.

    By default only this machine can reach it. torch itself would listen on every interface, whatever address it is
    given.
    """
    try:
        listening = socket.create_server((address, port))
    except OSError as error:
        raise _cannot_listen(port, error) from None
    port = listening.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _cannot_listen(port: int, error: OSError) -> UserError:
    why = os.strerror(error.errno or 0)
    return UserError(
        f"ranks cannot meet at port {port} of this machine: {why}; give all ranks another MASTER_PORT, or unset RANK to start"
        " the ranks here"
    )


def visit(port: int, address: str = LOCAL, timeout: float = 300) -> TCPStore:
    """The store at this port, as a client. Raises CommunicationError if it does not answer within `timeout`."""
    address = LOCAL if is_local(address) else address
    try:
        limit = timedelta(seconds=timeout)
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise failed(f"meeting the other ranks at {address}:{port}", error) from error


def within(store: Store, name: str) -> Store:
    """A store with its own key prefix."""
    return PrefixStore(name, store)


def join(store: Store, job: str, rank: int, world: int, kind: Kind, timeout: float) -> None:
    """Join the job of this name as a rank."""
    dist.init_process_group(
        BACKENDS[kind],
        store=within(store, job),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )


def join_by_environment(kind: Kind, timeout: float) -> None:
    """Join as the rank given by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    try:
        dist.init_process_group(BACKENDS[kind], init_method="env://", timeout=timedelta(seconds=timeout))
    except dist.DistNetworkError as error:
        raise UserError(
            f"the ranks cannot meet: {first_line(error)}; if the port is taken, give all ranks another MASTER_PORT"
        ) from None


def barrier() -> None:
    """Wait for all ranks of the job. NCCL must be told the device, otherwise it guesses and warns."""
    on_gpu = dist.get_backend() == BACKENDS["cuda"]
    dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)


def leave() -> None:
    barrier()  # no rank leaves while another still needs its connection
    dist.destroy_process_group()
    forget()


def leave_if_joined() -> None:
    """At the end of a program, without waiting for other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def forget() -> None:
    """Release the process groups of a finished job."""
    # A gloo group has threads that wake a hundred times a second until its last reference is gone. Networks are
    # reference cycles, and distributed tensors remember the meshes they were on: both must be released.
    torch_private.forget_layouts()
    gc.collect()
