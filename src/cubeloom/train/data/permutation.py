"""A random order of any number of items, computed and not stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cubeloom.base import counter

_ROUNDS = 6


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 to size - 1 onto itself, given by a key: a Feistel network on the smallest 4ⁿ that is not
    smaller.

    A result out of range is permuted again until it is in range (cycle walking), fewer than four times on average.
    """

    size: int
    key: int

    def __call__(self, index: Tensor) -> Tensor:
        """The new position of each int64 index."""
        place = self._mixed(index)
        while (outside := place >= self.size).any():
            place[outside] = self._mixed(place[outside])
        return place

    def _mixed(self, index: Tensor) -> Tensor:
        half = max(1, ((self.size - 1).bit_length() + 1) // 2)
        mask = (1 << half) - 1
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (counter.bits(counter.key(self.key, turn), right) & mask)
        return torch.bitwise_or(left << half, right)
