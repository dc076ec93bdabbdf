"""Compute a block once more in the backward instead of keeping its activations, and know then which strand it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.utils.checkpoint import checkpoint

from cubeloom.weave import loom


def recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """As torch's checkpoint. Masks of dropout come out the same, also where strands are woven."""
    here = loom.place()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _replaying(here)

    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)


@contextmanager
def _replaying(place: tuple[int, int]) -> Iterator[None]:
    loom._replayed.append(place)
    try:
        yield
    finally:
        loom._replayed.pop()
