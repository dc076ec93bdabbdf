"""Recomputes a block in the backward instead of keeping its activations, for the same strand as in the forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cubeloom.parallel.weave.loom import place, recording, replaying_as


def recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """As torch's checkpoint. Dropout masks and sums over strands are the same in the recomputation, also in a weave."""
    here = place()
    agreed: list[Tensor] = []

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return recording(agreed), replaying_as(here, agreed)

    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)
