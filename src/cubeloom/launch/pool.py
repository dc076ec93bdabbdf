"""Ranks as local processes, started once and given one job after another.

    with RankPool(8) as pool:
        results = pool.run(8, function, argument)     # function runs on each rank, inside a process group of 8

The processes fork from a server that has imported torch already, so that a rank starts in milliseconds. What a rank
returns or raises comes back pickled. A rank that fails or hangs ends the job, and the pool starts afresh for the next.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from cubeloom.comm import devices, world

# Forked ranks have these in memory already; torch imports its compiler when the first distributed tensor is made.
_PRELOAD = ["cubeloom.launch.pool", "cubeloom.models", "torch._dynamo"]


class RankFailed(RuntimeError):
    """A rank died or did not answer in time, or raised what could not be sent here."""


class RankPool:
    def __init__(self, size: int, device: devices.Kind = devices.CPU) -> None:
        self.size = size
        self.device = device
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._jobs = 0
        self._store: world.TCPStore | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        """Call `function(*arguments)` on as many ranks; their results, by rank."""
        if ranks > self.size:
            raise ValueError(f"this pool has {self.size} ranks and {ranks} were asked for")
        self._start(ranks)
        self._jobs += 1
        for rank in range(ranks):
            self._ranks[rank][1].send((function, arguments, rank, ranks, f"job{self._jobs}", timeout))
        try:
            return self._collect(ranks, timeout)
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: int) -> None:
        if self._store is None:
            self._store = world.host()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        while len(self._ranks) < ranks:
            ours, theirs = context.Pipe()
            rank = len(self._ranks)
            shared = self.size > devices.count(self.device)
            process = context.Process(
                target=_serve, args=(theirs, self._store.port, rank, self.device, shared), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, ranks: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        silent = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:ranks])}
        while silent:
            ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = ", ".join(map(str, sorted(silent.values())))
                raise RankFailed(f"no answer from rank {missing} of {ranks} within {timeout:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = silent.pop(pipe)
                results[rank] = self._answer(pipe, rank, ranks)
        return [results[rank] for rank in range(ranks)]

    def _answer(self, pipe: Connection, rank: int, ranks: int) -> Any:
        try:
            error, trace, result = pipe.recv()
        except EOFError:
            process = self._ranks[rank][0]
            process.join(1)
            raise RankFailed(f"rank {rank} of {ranks} died with exit code {process.exitcode}") from None
        if error is not None:
            # A rank's own error, so that callers can tell a user's mistake from ours; the trace tells where.
            raise error from RankFailed(f"rank {rank} of {ranks}:\n{trace}")
        return result

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []
        self._store = None


def run(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    device: devices.Kind = devices.CPU,
    timeout: float = 600,
) -> list[Any]:
    """`function(*arguments)` on ranks of this machine, for one job."""
    with RankPool(ranks, device) as pool:
        return pool.run(ranks, function, *arguments, timeout=timeout)


def _serve(pipe: Connection, port: int, local_rank: int, device: devices.Kind, shared: bool) -> None:
    """A rank's life: wait for a job, join its process group, run it, answer."""
    _settle(local_rank, device, shared)
    store = world.visit(port)
    while True:
        try:
            function, arguments, rank, ranks, job, timeout = pipe.recv()
        except EOFError:
            return
        try:
            world.join(store, job, rank, ranks, device, timeout)
            result = function(*arguments)
            world.leave()
        except Exception as error:
            pipe.send((_portable(error), traceback.format_exc(), None))
            return  # the group is in an unknown state: the pool starts another process in this one's place
        pipe.send((None, "", result))


def _settle(local_rank: int, device: devices.Kind, shared: bool) -> None:
    """Threads, memory, sockets and device of a rank on this machine."""
    torch.set_num_threads(1)
    gc.freeze()  # what was forked is never garbage: looking through it would take a tenth of a second each time
    os.environ.update(devices.wiring(device, local_rank, shared))
    devices.use(device, local_rank)


def _portable(error: Exception) -> Exception:
    """The error itself if it can travel, otherwise its words."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RankFailed(f"{type(error).__name__}: {error}")
    return copy if isinstance(copy, Exception) else RankFailed(str(error))
