"""Groups are made by all their ranks together. Torch lets a rank wait half an hour for one that does not come, in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import DistStoreError

from cubeloom.comm.failure import CommunicationError
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
    except DistStoreError as error:
        # A group whose own limit is shorter: the rank that did not come makes it fail in torch's words.
        raise CommunicationError(f"{who}: {what}: not all ranks came within {patience:g} s") from error
    finally:
        limit.cancel()
