"""A model's own random samples by number, to try a model or a grid without data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cubeloom.models import ModelSource
from cubeloom.parallel import Batch


@dataclass(frozen=True)
class RandomSamples:
    """Named as in the model's forward."""

    source: ModelSource
    of_step: Batch
    seed: int
    dtype: torch.dtype
    as_forward: bool = True

    @property
    def sequence(self) -> int:
        return self.of_step.sequence

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        """`numbers` must all be of one step's batch."""
        step, rows = int(numbers[0]) // self.of_step.samples, numbers % self.of_step.samples
        whole = self.source.samples(self.of_step, self.seed, step, self.dtype)
        return {name: each[rows] for name, each in whole.items()}
