"""One training at a time writes to a folder: two would take each other's checkpoints away."""

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
"""Seconds that a file server keeps the locks of a machine that has died, and more: NFS 4 usually has 90."""
_LOOK = 1.0


@contextmanager
def locked(folder: Path, network: Network) -> Iterator[None]:
    """Rank 0 claims the folder for as long as this is entered, or all ranks are refused."""
    held = network.host_group.agree(lambda: _hold(folder) if network.rank == 0 else None)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def check_unlocked(folder: Path) -> None:
    """Before any process starts."""
    if (folder / _LOCK).exists():
        os.close(_hold(folder))


def _hold(folder: Path) -> int:
    """The open file that claims the folder: the system ends the claim with the process that has it open."""

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
        return file  # a disk without locks: then nobody is kept out
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()}{_here()}".encode(), 0)
    return file


def _lock(file: int, folder: Path) -> None:
    patience = time.monotonic() + LEASE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            who = os.pread(file, 200, 0).decode(errors="replace")
            # Whoever is on another machine may have died with it, and its claim lives on for a while.
            if who.endswith(_here()) or time.monotonic() > patience:
                raise UserError(
                    f"folder = {str(folder)!r}: {who or 'somebody'} is training there; wait for its end, or choose another "
                    "folder"
                ) from None
            time.sleep(_LOOK)


def _here() -> str:
    return f" on {platform.node()}"
