from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubeloom.comm import devices
from cubeloom.launch import RankPool
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
def gpu_ranks() -> Iterator[RankPool]:
    """Eight on the GPU that there is, each with its part of it."""
    with sharing(8, devices.count("cuda")), RankPool(8, "cuda") as pool:
        yield pool
