"""Allows one training at a time in a folder: two would delete each other's checkpoints."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cubeloom.base.errors import UserError
from cubeloom.base.file_errors import retried
from cubeloom.comm import Network

_LOCK = ".lock"
LEASE = 120.0
"""Seconds that a file server keeps the locks of a machine that has died, with a margin: NFS 4 usually has 90."""
_LOOK = 1.0


@contextmanager
def locked(folder: Path, network: Network) -> Iterator[None]:
    """Rank 0 locks the folder while this context is entered, or all ranks are refused."""
    held = network.host_group.agree(lambda: _hold(folder) if network.rank == 0 else None)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def check_unlocked(folder: Path) -> None:
    """Check before any process starts."""
    if (folder / _LOCK).exists():
        os.close(_hold(folder))


def _hold(folder: Path) -> int:
    """The open lock file. The system releases the lock when the process that has it open ends."""

    def opened() -> int:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)

    file = retried(f"folder = {str(folder)!r} cannot be written to", opened)
    try:
        _lock(file, folder)
    except UserError:
        os.close(file)
        raise
    except OSError:
        return file  # a file system without locks: then there is no protection
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()}{_here()}".encode(), 0)
    return file


def _lock(file: int, folder: Path) -> None:
    deadline = time.monotonic() + LEASE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            who = os.pread(file, 200, 0).decode(errors="replace")
            # The holder may have died with another machine, whose lock then persists for a while.
            if who.endswith(_here()) or time.monotonic() > deadline:
                raise UserError(
                    f"folder = {str(folder)!r}: {who or 'somebody'} is training there; wait for its end, or choose another "
                    "folder"
                ) from None
            time.sleep(_LOOK)


def _here() -> str:
    return f" on {platform.node()}"
