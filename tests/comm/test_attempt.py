"""Ranks of one attempt get one name, whatever an attempt before left in the store that they share."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from cubeloom.comm import CommunicationError, world
from cubeloom.comm.attempt import name_attempt

pytestmark = pytest.mark.timeout(60)


def _come(port: int, rank: int, ranks: int = 3, patience: float = 20) -> str:
    return name_attempt(world.visit(port), rank, ranks, patience)


def _attempt(pool: ThreadPoolExecutor, port: int, order: tuple[int, ...]) -> set[str]:
    """The names that ranks get who come in this order, each some time after the one before."""
    found: list[Future[str]] = []
    for rank in order:
        found.append(pool.submit(_come, port, rank))
        time.sleep(0.4)
    return {each.result() for each in found}


@pytest.mark.slow
def test_each_attempt_has_one_name_whoever_comes_first() -> None:
    """A rank that comes before rank 0 finds the name of the attempt before, and must not take it."""
    store = world.host()
    with ThreadPoolExecutor(4) as pool:
        names = [_attempt(pool, store.port, order) for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2))]
        # One in which a rank died that had answered: the next process in its place is another.
        died = pool.submit(_come, store.port, 0, 3, 0.5)
        pool.submit(_come, store.port, 1, 3, 0.5)
        with pytest.raises(CommunicationError, match=r"of 3 ranks 1 did not come within 0.5 s: 2$"):
            died.result()
        names.append(_attempt(pool, store.port, (1, 2, 0)))
    assert all(len(each) == 1 for each in names)
    assert len(set.union(*names)) == len(names)


def test_a_rank_does_not_wait_for_ever_for_rank_0() -> None:
    store = world.host()
    with pytest.raises(CommunicationError, match=r"rank 1 waited 0.5 s for rank 0"):
        _come(store.port, 1, 2, 0.5)
