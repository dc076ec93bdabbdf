"""A gate at which processes wait until another one opens it, or dies."""

from __future__ import annotations

from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Self


class Gate:
    """Belongs to the process that created it; others get it as an argument when they are started.

    multiprocessing's Event does not work here: setting it waits until all sleeping processes are awake, and so forever
    if one of them was killed. Here nobody waits for the waiting processes: they read from a pipe in which nothing is
    ever sent, until its other end is closed.
    """

    def __init__(self, context: BaseContext) -> None:
        self._theirs, self._ours = context.Pipe(duplex=False)

    def set(self) -> None:
        self._ours.close()

    def wait(self) -> None:
        self._theirs.poll(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._theirs.close()

    def __getstate__(self) -> Connection:
        return self._theirs

    def __setstate__(self, theirs: Connection) -> None:
        self._theirs = theirs
