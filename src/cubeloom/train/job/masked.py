"""Samples with masked tokens, for BERT. Which tokens are masked depends only on the seed and the sample's number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cubeloom.base import counter
from cubeloom.models.naming import IGNORED
from cubeloom.train.data import Samples

# the chosen share of all tokens; of these, up to where they are masked and replaced
CHOSEN, HIDDEN, REPLACED = 0.15, 0.8, 0.9


@dataclass(frozen=True)
class MaskedTokens:
    """80 % of the chosen tokens become `mask`, 10 % any other token and 10 % stay. Only these are targets."""

    plain: Samples
    vocabulary: int
    mask: int
    seed: int

    @property
    def sequence(self) -> int:
        return self.plain.sequence

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        tokens = self.plain.batch(numbers)["tokens"]
        places = numbers[:, None] * self.sequence + torch.arange(self.sequence)
        chosen, how, other = (
            counter.uniform(counter.key(self.seed, what), places) for what in ("chosen", "how", "other")
        )
        learned = chosen < CHOSEN
        learned[:, 0] |= ~learned.any(1)  # at least one in each sample
        replaced = torch.where(how < REPLACED, (other * self.vocabulary).long(), tokens)
        shown = torch.where(learned, torch.where(how < HIDDEN, self.mask, replaced), tokens)
        return {"tokens": shown, "targets": tokens.masked_fill(~learned, IGNORED)}
