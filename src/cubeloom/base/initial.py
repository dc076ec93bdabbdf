"""How parameters are initialised: declared by a model beside its layers, drawn by the rank that holds a shard."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers with mean zero."""

    std: float


@dataclass(frozen=True)
class Constant:
    value: float


Initial = Normal | Constant
