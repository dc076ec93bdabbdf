"""A pool of ranks outlives the loss of one, also of one that has nothing to do."""

from __future__ import annotations

import os
import signal
import time

import pytest

from cubeloom import UserError
from cubeloom.launch import RankFailed, RankPool

pytestmark = pytest.mark.timeout(120)


def test_a_rank_that_died_idle_is_named_once_and_replaced() -> None:
    with RankPool(2) as pool:
        _, second = pool.run(2, os.getpid)
        os.kill(second, signal.SIGKILL)
        time.sleep(0.5)  # until its end of the pipe is closed
        with pytest.raises(RankFailed, match="rank 1 of 2"):
            pool.run(2, os.getpid)
        assert second not in pool.run(2, os.getpid)


def test_ranks_have_the_variables_of_when_their_pool_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are started later: pools with other parts of a GPU may exist by then."""
    monkeypatch.setenv("PART", "a quarter")
    with RankPool(2) as pool:
        assert pool.run(1, os.getenv, "PART") == ["a quarter"]
        monkeypatch.setenv("PART", "an eighth")
        assert pool.run(2, os.getenv, "PART") == ["a quarter"] * 2


def test_more_ranks_than_a_machine_can_start_are_refused() -> None:
    with pytest.raises(UserError, match="5,000 ranks are more than this machine can start"):
        RankPool(5000)
