"""Compute a block once more in the backward instead of keeping its activations, and know then which strand it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cubeloom.parallel.weave.loom import place, recording, replaying_as


def recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """As torch's checkpoint. Masks of dropout and sums over strands come out the same, also where strands are woven."""
    here = place()
    agreed: list[Tensor] = []

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return recording(agreed), replaying_as(here, agreed)

    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)
