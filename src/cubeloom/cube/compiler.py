"""How we call torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BACKEND = "inductor"
# Try several shapes of blocks for each kernel and keep the fastest: seconds, once.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"max_autotune_pointwise": True}


def compiled(function: Callable[..., Any], backend: str = BACKEND) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, options=_OPTIONS if backend == BACKEND else None)
