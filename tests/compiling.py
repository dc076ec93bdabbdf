"""What the compiler does to a graph, without the minutes of making kernels."""

from __future__ import annotations

from cubeloom.parallel import compiled

BACKEND = "aot_eager"


def without_kernels() -> None:
    """From now on, in this process."""
    compiled.BACKEND = BACKEND
