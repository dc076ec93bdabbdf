"""Names the attempt of a job, so that ranks of different attempts do not meet.

An agent's store outlives a restart and still has the addresses of dead ranks, and agents of several machines count
restarts separately. Rank 0 therefore gives each attempt a unique name, and makes sure that the others are alive to
receive it.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import DistStoreError

from cubeloom.comm.failure import CommunicationError
from cubeloom.comm.world import TCPStore

_CALL = "cubeloom attempt"  # the store key with the newest name
_LOOK = timedelta(seconds=0.25)


def name_attempt(store: TCPStore, rank: int, world: int, timeout: float) -> str:
    """Return a name that all ranks of this attempt get, and no rank of another attempt in the same store.

    Rank 0 announces a new name. Every other rank answers the newest name with a random value, and has joined when rank
    0 repeats this value. So it never takes the name of an attempt that is over, and is never confused with a dead rank.
    """
    deadline = time.monotonic() + timeout
    if rank == 0:
        return _call(store, world, timeout)
    mine = uuid.uuid4().hex
    while time.monotonic() < deadline:
        try:
            store.wait([_CALL], _LOOK)
            name = store.get(_CALL).decode()
            store.set(f"{name}/{rank}", mine)
            store.wait([f"{name}/all"], _LOOK)
        except DistStoreError:
            continue
        if mine in store.get(f"{name}/all").decode().split():
            return name
        time.sleep(_LOOK.total_seconds())  # an attempt that is over: rank 0 of this one has not announced a name yet
    raise CommunicationError(f"rank {rank} waited {timeout:g} s for rank 0 to begin the attempt, and it did not come")


def _call(store: TCPStore, world: int, timeout: float) -> str:
    name = uuid.uuid4().hex
    answers = [f"{name}/{rank}" for rank in range(1, world)]
    store.set(_CALL, name)
    try:
        if answers:
            store.wait(answers, timedelta(seconds=timeout))
    except DistStoreError:
        absent = [rank for rank, answer in enumerate(answers, 1) if not store.check([answer])]
        named = ", ".join(map(str, absent[:8])) + (", …" if len(absent) > 8 else "")
        raise CommunicationError(f"of {world} ranks {len(absent)} did not come within {timeout:g} s: {named}") from None
    store.set(f"{name}/all", " ".join(store.get(answer).decode() for answer in answers))
    return name
