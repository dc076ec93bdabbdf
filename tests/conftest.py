from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from unittest.mock import patch

import pytest

from cubeloom.launch import RankPool, elastic
from cubeloom.launch.share_gpu import sharing


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the suite, since much of it keeps one core busy; none besides this one where files are named."""
    return 2 if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes started once and shared by all tests, of a worker where pytest has several."""
    with RankPool(16) as pool:
        yield pool


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Callable[[int], RankPool]]:
    """Ranks of the GPU that there is: a pool for every size asked for, in which each has the part that it has in a job."""
    with ExitStack() as kept:

        @cache
        def pool_of(ranks: int) -> RankPool:
            # Only its ranks are to see the variables of their MPS, which would fail with any process that is ended at work.
            with patch.dict(os.environ):
                kept.enter_context(sharing(ranks, "cuda"))
                return kept.enter_context(RankPool(ranks, "cuda"))

        yield pool_of


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """That an agent starts one is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(elastic, "elastic_launch", refuse)
