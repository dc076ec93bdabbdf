"""The names of dtypes: torch's, and the short ones that people also write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Trained = Literal["float64", "float32", "bfloat16"]
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def full_name(name: str) -> str:
    """`bfloat16` for `bf16`; any other name unchanged."""
    return SHORT.get(name, name)


def as_torch(name: str) -> torch.dtype:
    import torch  # settings and options name dtypes without importing it

    found: torch.dtype = getattr(torch, name)
    return found
