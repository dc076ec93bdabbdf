"""Runs a program on tensors that have shapes and no values.

torch's fake tensors refuse to give a number. Our programs ask for few, and none of them decides what is computed or
communicated: losses to report, numbers of targets to weigh losses with, the step that AdamW corrects for. Each is
answered with 1. Programs also ask for a tensor's address to identify it: this is answered with its storage's identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cubeloom.base.torch_private import FakeTensor, FakeTensorMode, storage_identity


@contextmanager
def without_values() -> Iterator[None]:
    # The answers are put on the class, and not into a thread's mode, because a backward runs with that mode off.
    asked: dict[str, Any] = {"item": _one, "tolist": _ones, "data_ptr": _address}
    # Other people's models ask in other ways.
    asked |= {"__bool__": lambda _: True, "__int__": lambda _: 1, "__index__": lambda _: 1, "__float__": lambda _: 1.0}
    answers = patch.multiple(FakeTensor, create=True, **asked)
    # Models are built on the meta device before it is known that this is not a real run.
    with answers, FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _one(tensor: Tensor) -> bool | int | float:
    if tensor.is_floating_point():
        return 1.0
    return True if tensor.dtype == torch.bool else 1


def _ones(tensor: Tensor) -> Any:
    found: Any = _one(tensor)
    for size in reversed(tensor.shape):
        found = [found] * size
    return found


def _address(tensor: Tensor) -> int:
    return hash((storage_identity(tensor), tensor.storage_offset()))
