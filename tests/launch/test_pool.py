"""A pool of ranks outlives the loss of one, also of one that has nothing to do."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.util import Finalize
from pathlib import Path

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


def _leave_a_word(folder: Path) -> None:
    Finalize(None, (folder / str(os.getpid())).touch, exitpriority=1)


def test_idle_ranks_clean_up_behind_themselves(tmp_path: Path) -> None:
    """As torch's compiler has them end its processes: what is killed cannot."""
    with RankPool(2) as pool:
        pool.run(2, _leave_a_word, tmp_path)
        ranks = pool.run(2, os.getpid)
    assert {path.name for path in tmp_path.iterdir()} == set(map(str, ranks))


def test_a_busy_rank_does_not_hold_up_the_end_of_a_pool() -> None:
    with RankPool(1) as pool:
        with pytest.raises(RankFailed, match="no answer from rank 0 of 1"):
            pool.run(1, time.sleep, 1000, timeout=0.5)
        began = time.monotonic()
    assert time.monotonic() - began < 30


def test_ranks_have_the_variables_of_when_their_pool_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are started later: pools with other parts of a GPU may exist by then."""
    monkeypatch.setenv("PART", "a quarter")
    with RankPool(2) as pool:
        assert pool.run(1, os.getenv, "PART") == ["a quarter"]
        monkeypatch.setenv("PART", "an eighth")
        assert pool.run(2, os.getenv, "PART") == ["a quarter"] * 2


def _has_imported(name: str) -> bool:
    return name in sys.modules


def test_ranks_begin_with_what_their_caller_has_imported() -> None:
    """The server that they fork from has imported it for all of them."""
    with RankPool(2) as pool:
        assert pool.run(2, _has_imported, "cubeloom.tools.verify") == [True, True]


def test_more_ranks_than_a_machine_can_start_are_refused() -> None:
    with pytest.raises(UserError, match="5,000 ranks are more than this machine can start"):
        RankPool(5000)
