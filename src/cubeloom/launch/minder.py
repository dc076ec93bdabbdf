"""A small process beside each rank, which kills the rank if it cannot end itself.

A rank that gets a signal handles it in Python, but Python may be stuck in C++, or the whole process may be stopped. A
launcher then waits, torch's agent for half a minute, while all other ranks wait for this one. This file is also the
program of that process: it imports only what starts in a few milliseconds.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Self

_LOOK = 0.5
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Minder:
    """While it is entered, a SIGTERM ends this process within `grace` seconds, whatever it is doing.

    A stopped process cannot handle a SIGTERM, and has only `stopped` seconds. `agent`: the process that started this
    one. If that dies, this one gets a SIGTERM, because nothing else would end it.
    """

    def __init__(self, name: str, grace: float, agent: int | None = None, stopped: float = 5.0) -> None:
        self._words = (name, str(os.getpid()), str(grace), str(min(grace, stopped)), str(agent or 0))

    def __enter__(self) -> Self:
        theirs, self._ours = os.pipe()
        os.set_blocking(self._ours, False)
        # Without site packages and the user's settings: they take longer than everything else.
        command = [sys.executable, "-I", "-S", __file__, *self._words, str(theirs)]
        self._process = subprocess.Popen(command, pass_fds=[theirs])
        os.close(theirs)
        # The C part of Python's signal handler writes each signal's number there, even if Python itself is stuck.
        self._before = signal.set_wakeup_fd(self._ours, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._ours)
        self._process.kill()  # one of our child processes may have the pipe open
        self._process.wait()


def _mind(name: str, rank: int, grace: float, stopped: float, agent: int, pipe: int) -> None:
    """Runs until the rank has ended."""
    deadline = deadline_stopped = float("inf")
    while os.getppid() == rank:
        heard, _, _ = select.select([pipe], [], [], _LOOK)
        numbers = os.read(pipe, 4096) if heard else b""
        if heard and not numbers:
            return  # the rank has closed the pipe, or has ended
        now = time.monotonic()
        if signal.SIGTERM in numbers:
            deadline = min(deadline, now + grace)
        waits = _keeps_waiting(rank)
        deadline_stopped = min(deadline_stopped, now + stopped) if waits else float("inf")
        if now > min(deadline, deadline_stopped):
            waited, why = (stopped, "it is stopped") if waits else (grace, "it is stuck")
            sys.stderr.write(f"{name}: killed, since it had not ended {waited:g} s after a SIGTERM: {why}\n")
            os.kill(rank, signal.SIGKILL)
            return
        if agent and _parent_of(rank) not in (agent, None):
            sys.stderr.write(f"{name}: asked to stop, since the agent that started it is gone\n")
            os.kill(rank, signal.SIGTERM)
            agent = 0


def _keeps_waiting(process: int) -> bool:
    """Whether it is stopped (not by a debugger), with a SIGTERM that it will handle only when it continues."""
    found = dict(line.split(":\t", 1) for line in _read(f"/proc/{process}/status") if ":\t" in line)
    pending = int(found.get("ShdPnd", "0"), 16) | int(found.get("SigPnd", "0"), 16)
    return found.get("State", "").startswith("T") and bool(pending & 1 << signal.SIGTERM - 1)


def _parent_of(process: int) -> int | None:
    """None if it is unknown."""
    for line in _read(f"/proc/{process}/stat"):
        return int(line.rpartition(")")[2].split()[1])
    return None


def _read(file: str) -> list[str]:
    with suppress(OSError), open(file, encoding="utf-8", errors="replace") as lines:  # noqa: PTH123 (pathlib is slow to import)
        return [line.rstrip("\n") for line in lines]
    return []


if __name__ == "__main__":
    for each in _IGNORED:  # a terminal sends these to all its processes
        signal.signal(each, signal.SIG_IGN)
    with suppress(ProcessLookupError):  # it ended meanwhile
        _, name, rank, *seconds, agent, pipe = sys.argv
        _mind(name, int(rank), float(seconds[0]), float(seconds[1]), int(agent), int(pipe))
