"""Recomputes a block in the backward instead of keeping its activations, for the same strand as in the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cubeloom.base import torch_private
from cubeloom.parallel.weave.kept import KeptResults
from cubeloom.parallel.weave.loom import place, recording, replaying_as


def recompute(
    function: Callable[..., Any],
    *arguments: Any,
    early_stop: bool = True,
    keeps: frozenset[str] = frozenset(),
    **named: Any,
) -> Any:
    """As torch's checkpoint. Dropout masks and sums over strands are the same in the recomputation, also in a weave.

    `early_stop`: the recomputed forward stops once the backward has all it needs. `keeps`: layers whose results are kept,
    so that they are not computed again.
    """
    if not torch.is_grad_enabled():
        return function(*arguments, **named)
    here, modes, dtype = place(), torch_private.function_modes(), torch.get_default_dtype()
    agreed: list[Tensor] = []
    results = KeptResults(keeps)

    @contextmanager
    def again() -> Iterator[None]:
        """With the modes and the dtype of the first forward, which the forward of the whole model may have set."""
        with ExitStack() as stack:
            stack.enter_context(replaying_as(here, agreed, results))
            for mode in modes:
                stack.enter_context(mode)
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return recording(agreed, results), again()

    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts, early_stop=early_stop, **named)
