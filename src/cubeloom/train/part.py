"""What this rank updates of a parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Part:
    """Some rows of this rank's block of a parameter, or all. Shares memory with the block."""

    tensor: nn.Parameter
    rows: slice
