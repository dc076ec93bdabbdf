"""Samples of random tokens, to try a model or a grid without text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cubeloom.base import counter
from cubeloom.train.data.stream import following


@dataclass(frozen=True)
class RandomTokens:
    """All tokens are equally likely, so the smallest possible loss is the logarithm of their number."""

    vocabulary: int
    sequence: int
    seed: int = 0

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        return following(self.samples(numbers))

    def samples(self, numbers: Tensor) -> Tensor:
        width = self.sequence + 1
        places = numbers[:, None] * width + torch.arange(width)
        drawn = counter.uniform(counter.key(self.seed, "random tokens"), places)
        return (drawn * self.vocabulary).long()
