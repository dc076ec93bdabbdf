"""Groups are made by all their ranks together. Torch lets a rank wait half an hour for one that does not come, in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cubeloom.comm.watch import end_rank

LEAST = 60.0  # seconds: a rank that has just begun may still be importing


@contextmanager
def meeting(who: str, what: str, patience: float | None, end: Callable[[str], None] = end_rank) -> Iterator[None]:
    """Groups are being made: if that lasts longer than our patience, end this rank with words that say so."""
    if patience is None:
        yield
        return
    seconds = max(patience, LEAST)
    words = f"{who}: {what}: not all ranks came within {seconds:g} s"
    limit = threading.Timer(seconds, end, (words,))
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
