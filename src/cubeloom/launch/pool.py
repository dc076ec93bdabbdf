"""Ranks as local processes, started once and given one job after another.

    with RankPool(8) as pool:
        results = pool.run(8, function, argument)     # function runs on each rank, inside a process group of 8

The processes fork from a server that has already imported torch, so a rank starts in milliseconds. Results and
exceptions of a rank are pickled. A rank that fails or hangs ends the job, and the pool starts new processes for the
next.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from cubeloom.comm import CommunicationError, blames_others, devices, watch, world
from cubeloom.launch.ready import check_startable, make_ready, preload

_GRACE = 1.0  # seconds that ranks have to end, and the others to report, after one has failed


class RankFailed(RuntimeError):
    """A rank died or did not answer in time, or raised an exception that cannot be pickled."""


class RankPool:
    def __init__(self, size: int, device: devices.Kind = devices.CPU) -> None:
        check_startable(size)
        self.size = size
        self.device = device
        self._variables = dict(os.environ)  # also of ranks that are started later
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._jobs = 0
        self._store: world.TCPStore | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        """Call `function(*arguments)` on this many ranks; return their results, by rank."""
        if ranks > self.size:
            raise ValueError(f"this pool has {self.size} ranks and {ranks} were asked for")
        self._start(ranks)
        self._jobs += 1
        try:
            self._send(ranks, function, arguments, timeout)
            return self._collect(ranks, timeout)
        except BaseException:
            self._end()
            raise

    def _start(self, ranks: int) -> None:
        if self._store is None:
            self._store = world.host()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preload())
        while len(self._ranks) < ranks:
            ours, theirs = context.Pipe()
            rank = len(self._ranks)
            process = context.Process(
                target=_serve,
                args=(theirs, self._store.port, rank, self.device, self.size, self._variables),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _send(self, ranks: int, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> None:
        for rank, (process, pipe) in enumerate(self._ranks[:ranks]):
            try:
                pipe.send((function, arguments, rank, ranks, f"job{self._jobs}", timeout))
            except BrokenPipeError:
                process.join(1)
                words = f"rank {rank} of {ranks} had died before, with exit code {process.exitcode}"
                raise RankFailed(words) from None

    def _collect(self, ranks: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        deadline = time.monotonic() + timeout
        silent = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:ranks])}
        while silent:
            ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = silent.pop(pipe)
                answer = self._answer(pipe, rank, ranks)
                if isinstance(answer, _Failure):
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + _GRACE)
                else:
                    results[rank] = answer
        if failures:
            _raise(failures, sorted(silent.values()), ranks)
        if silent:
            missing = ", ".join(map(str, sorted(silent.values())))
            raise RankFailed(f"no answer from rank {missing} of {ranks} within {timeout:g} s")
        return [results[rank] for rank in range(ranks)]

    def _answer(self, pipe: Connection, rank: int, ranks: int) -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self._ranks[rank][0]
            process.join(1)
            died = RankFailed(f"rank {rank} of {ranks} died with exit code {process.exitcode}")
            return _Failure(died, "", blames_others=False)

    def close(self) -> None:
        """Let idle ranks end by themselves, together with processes that they started, such as torch's compiler's."""
        for _, pipe in self._ranks:
            pipe.close()
        deadline = time.monotonic() + _GRACE
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        self._end()

    def _end(self) -> None:
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
    """Run `function(*arguments)` on ranks of this machine, for one job."""
    with RankPool(ranks, device) as pool:
        return pool.run(ranks, function, *arguments, timeout=timeout)


@dataclass(frozen=True)
class _Failure:
    error: Exception
    trace: str
    blames_others: bool  # the failure was caused by another rank


def _raise(failures: dict[int, _Failure], silent: list[int], ranks: int) -> NoReturn:
    """Raise the first error, with those of the other ranks as notes."""
    first = min(failures, key=lambda rank: (failures[rank].blames_others, rank))
    begin = failures.pop(first)
    for rank, failure in failures.items():
        begin.error.add_note(f"rank {rank} of {ranks}: {failure.error}")
    if silent:
        begin.error.add_note(f"rank {', '.join(map(str, silent))} of {ranks} did not answer and was ended")
    raise begin.error from RankFailed(begin.trace) if begin.trace else None


def _serve(
    pipe: Connection, port: int, local_rank: int, device: devices.Kind, size: int, variables: dict[str, str]
) -> None:
    """The main loop of a rank: wait for a job, join its process group, run it, answer."""
    # The server that forks ranks has the variables of its own start.
    os.environ.clear()
    os.environ.update(variables)
    make_ready(local_rank, device, size)
    watch.tell_last_words_to(lambda words: pipe.send(_Failure(CommunicationError(words), "", blames_others=True)))
    store = world.visit(port)
    while True:
        try:
            function, arguments, rank, ranks, job, timeout = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            world.join(store, job, rank, ranks, device, timeout)
            result = function(*arguments)
            world.leave()
            pipe.send(result)
            del function, arguments, result
            # What outlives a job, such as the code that it imported, stays: each later job would search it for garbage.
            gc.freeze()
        except Exception as error:
            pipe.send(_failure(error, rank, ranks))
            return  # the process group is in an unknown state: the pool replaces this process


def _failure(error: Exception, rank: int, ranks: int) -> _Failure:
    """An error in a form that can be sent: its traceback, and the exception if it can be pickled."""
    trace = f"rank {rank} of {ranks}:\n{traceback.format_exc()}"
    return _Failure(_portable(error), trace, blames_others(error))


def _portable(error: Exception) -> Exception:
    """The exception if it can be pickled, otherwise its message."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RankFailed(f"{type(error).__name__}: {error}")
    return copy if isinstance(copy, Exception) else RankFailed(str(error))
