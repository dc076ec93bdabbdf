"""Run a program on tensors that have shapes and no values.

torch's fake tensors refuse to say a number, since they have none. Our programs ask for few, and none that decides what is
computed or communicated: losses to report, numbers of targets to weigh losses with, the step that AdamW corrects for. Each
is answered with one. And they ask where a tensor lies in memory, to know one from another: its storage's identity says so.
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
    # The answers are put on the class, not into a mode of the thread: a backward would run with that mode off.
    asked: dict[str, Any] = {"item": _one, "tolist": _ones, "data_ptr": _address}
    # Models of others ask in their own ways.
    asked |= {"__bool__": lambda _: True, "__int__": lambda _: 1, "__index__": lambda _: 1, "__float__": lambda _: 1.0}
    answers = patch.multiple(FakeTensor, create=True, **asked)
    # Models are built on the meta device before anybody knows that this is no true run.
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
