from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubeloom.launch import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes started once and shared by all tests."""
    with RankPool(16) as pool:
        yield pool
