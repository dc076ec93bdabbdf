"""A gate that processes wait at until another one opens it, or dies."""

from __future__ import annotations

from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Self


class Gate:
    """Belongs to the process that made it; others get it as an argument when they are started.

    An Event of multiprocessing would not do: to set one is to wait until all who sleep in it are awake, and thus forever if
    one of them was killed there. Here nobody waits for those who wait: they read from a pipe in which nothing is ever sent,
    until its other end is closed.
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
