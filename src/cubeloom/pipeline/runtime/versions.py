"""The weights of a stage in a pipeline that updates them while micro-batches are in flight (PipeDream, PipeDream-2BW).

A micro-batch computes with one version from its forward to its backward. The parameters hold the newest version. An
older one that is still needed is stored, and swapped in while an action uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cubeloom.parallel.parameter import exchange, local_of


class Versions:
    """`used`: the version of each micro-batch. Version 0 is in the parameters now."""

    def __init__(self, parameters: Sequence[nn.Parameter], used: Mapping[int, int]) -> None:
        self._parameters = parameters
        self._used = used
        self._backwards_to_come = Counter(used.values())
        self._newest = 0
        self._old: dict[int, list[Tensor]] = {}

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Inside the block the parameters hold this micro-batch's version."""
        version = self._used[microbatch]
        if version == self._newest:
            yield
            return
        newest = self._put(self._old[version])
        try:
            yield
        finally:
            self._put(newest)

    def backward_done(self, microbatch: int) -> None:
        version = self._used[microbatch]
        self._backwards_to_come[version] -= 1
        if not self._backwards_to_come[version]:
            self._old.pop(version, None)

    def update(self, change: Callable[[], None]) -> None:
        """Create the next version by changing the newest."""
        if self._backwards_to_come[self._newest]:
            with torch.no_grad():
                self._old[self._newest] = [local_of(parameter).clone() for parameter in self._parameters]
        change()
        self._newest += 1

    def _put(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        return [exchange(each, block) for each, block in zip(self._parameters, blocks, strict=True)]
