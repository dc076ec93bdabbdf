"""All ranks of a process group create it together. torch silently waits half an hour for a rank that does not come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import DistStoreError

from cubeloom.comm.failure import CommunicationError
from cubeloom.comm.watch import end_rank

LEAST = 60.0  # seconds: a rank that has just started may still be importing


@contextmanager
def meeting(who: str, what: str, timeout: float | None, end: Callable[[str], None] = end_rank) -> Iterator[None]:
    """While process groups are created: if this takes longer than `timeout`, end this rank with an error."""
    if timeout is None:
        yield
        return
    seconds = max(timeout, LEAST)
    words = f"{who}: {what}: not all ranks came within {seconds:g} s"
    limit = threading.Timer(seconds, end, (words,))
    limit.daemon = True
    limit.start()
    try:
        yield
    except DistStoreError as error:
        # If the group's own timeout is shorter, a missing rank raises torch's error here.
        raise CommunicationError(f"{who}: {what}: not all ranks came within {timeout:g} s") from error
    finally:
        limit.cancel()
