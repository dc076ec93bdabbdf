"""What the tests on a GPU have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cubeloom.comm import devices
from cubeloom.launch import RankPool

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not devices.available("cuda"), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

GpuRanks = Callable[[int], RankPool]
"""The pool of so many ranks."""
