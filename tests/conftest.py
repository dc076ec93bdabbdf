from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubeloom.comm import devices
from cubeloom.launch import RankPool
from cubeloom.launch.share_gpu import sharing


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes started once and shared by all tests."""
    with RankPool(16) as pool:
        yield pool


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[RankPool]:
    """Eight on the GPU that there is, each with its part of it."""
    with sharing(8, devices.count("cuda")), RankPool(8, "cuda") as pool:
        yield pool
