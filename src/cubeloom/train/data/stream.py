"""An endless stream of samples from one run of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cubeloom.base import counter
from cubeloom.base.errors import UserError
from cubeloom.train.data.checked import Checked
from cubeloom.train.data.permutation import Permutation
from cubeloom.train.data.tokenizer import Array


class Samples(Protocol):
    """Endless samples by number: the same number is the same sample, whoever asks and when."""

    @property
    def sequence(self) -> int: ...

    def samples(self, numbers: Tensor) -> Tensor:
        """`[n, sequence + 1]` tokens for n int64 numbers."""
        ...


@dataclass(frozen=True)
class Stream:
    """Windows of `sequence + 1` tokens, each beginning with the last token of the one before; all of them in each epoch.

    So in an epoch every token after the first is predicted once; only what does not fill a window at the end is left out.
    """

    tokens: Array | Checked
    sequence: int
    seed: int = 0
    shuffled: bool = True
    """Anew in each epoch; else in order."""
    tokenizer: str = ""
    """Its fingerprint: streams of different tokenizers do not mix."""
    vocabulary: int | None = None
    """How many tokens there are: none may be outside. By default nobody looks."""
    name: str = "the stream"
    """Where its tokens are from."""

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.windows < 1:
            raise UserError(f"{len(self.tokens)} tokens are too few for a sequence of {self.sequence}")

    @property
    def windows(self) -> int:
        """Samples in an epoch."""
        return (len(self.tokens) - 1) // self.sequence

    def samples(self, numbers: Tensor) -> Tensor:
        rows = [
            self.tokens[window * self.sequence : (window + 1) * self.sequence + 1]
            for window in self.order(numbers).tolist()
        ]
        found = torch.from_numpy(np.stack(rows).astype(np.int64))
        largest = int(found.max())
        # A model would look it up in a table that does not have it: an error far from here, or none at all.
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise UserError(
                f"{self.name} is damaged: it has a token {largest}, and a vocabulary of {self.vocabulary}; "
                f"`cubeloom data show {self.name}` checks its files"
            )
        return found

    def order(self, numbers: Tensor) -> Tensor:
        """Which window each sample is."""
        epochs, index = numbers // self.windows, numbers % self.windows
        if not self.shuffled:
            return index
        for epoch in epochs.unique().tolist():
            here = epochs == epoch
            index[here] = Permutation(self.windows, counter.key(self.seed, "epoch", epoch))(index[here])
        return index
