"""The dtypes in which a model's weights can be stored, with safetensors' names."""

from __future__ import annotations

import torch

from cubeloom.train.checkpoint.tensor_file import DTYPES as ALL

DTYPES = {code: dtype for code, dtype in ALL.items() if dtype.is_floating_point}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def plain(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
