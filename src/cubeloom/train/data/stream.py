"""An endless stream of samples from one sequence of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cubeloom.base import counter
from cubeloom.base.errors import UserError
from cubeloom.train.data.checked import Checked
from cubeloom.train.data.packing import Packs
from cubeloom.train.data.permutation import Permutation
from cubeloom.train.data.tokenizer import Array

IGNORED = -100
"""A target that does not count: torch and our losses ignore it."""
NO_DOCUMENT = -1
"""The document number of padding in a sample of packed documents."""


class Samples(Protocol):
    """Endless samples by number: the same number always gives the same sample."""

    @property
    def sequence(self) -> int: ...

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        """For n int64 numbers `tokens` and the `targets` that follow them, `[n, sequence]`; IGNORED is not a target.

        With packed documents also `documents`: the document of each token within its sample, or NO_DOCUMENT.
        """
        ...


def following(windows: Tensor) -> dict[str, Tensor]:
    """Tokens and their targets from `[n, sequence + 1]`, in their own memory even if n is 1."""
    return {"tokens": windows[:, :-1].clone(), "targets": windows[:, 1:].clone()}


@dataclass(frozen=True)
class Stream:
    """Windows of `sequence + 1` tokens, each beginning with the last token of the one before; all of them in each
    epoch.

    In an epoch every token after the first is thus predicted once; only an incomplete window at the end is skipped.
    With `packs` a sample consists of whole documents, padded with end tokens; none predicts the first token of another.
    """

    tokens: Array | Checked
    sequence: int
    seed: int = 0
    shuffled: bool = True
    """Shuffled again in each epoch; otherwise in order."""
    tokenizer: str = ""
    """The tokenizer's fingerprint: streams of different tokenizers cannot be mixed."""
    vocabulary: int | None = None
    """The number of tokens, which none may exceed. By default this is not checked."""
    name: str = "the stream"
    """Where its tokens come from."""
    counted: Array | Checked | None = None
    """For each token whether it counts as a target; by default all do."""
    packs: Packs | None = None
    end: int = 0
    """The token that pads packs."""
    kept: Array | None = None
    """The windows that are samples: those with a target that counts. By default all."""

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.windows < 1:
            raise UserError(f"{len(self.tokens)} tokens are too few for a sequence of {self.sequence}")

    @property
    def windows(self) -> int:
        """The number of samples in an epoch."""
        if self.kept is not None:
            return len(self.kept)
        return (len(self.tokens) - 1) // self.sequence if self.packs is None else len(self.packs)

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        found, bounds = following(self.samples(numbers)), self._bounds(numbers)
        if self.counted is not None:
            marks = self._rows(bounds, self.counted, 0)
            found["targets"].masked_fill_(marks[:, 1:] == 0, IGNORED)
        if self.packs is not None:
            documents = self._rows(bounds, self.packs, NO_DOCUMENT)
            found["documents"] = documents[:, :-1].contiguous()
            others = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] == NO_DOCUMENT)
            found["targets"].masked_fill_(others, IGNORED)
        return found

    def samples(self, numbers: Tensor) -> Tensor:
        """`[n, sequence + 1]` tokens."""
        found = self._rows(self._bounds(numbers), self.tokens, self.end)
        largest = int(found.max())
        # A model would look it up out of range: an error far from here, or none at all.
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise UserError(
                f"{self.name} is damaged: it has a token {largest}, and a vocabulary of {self.vocabulary}; "
                f"`cubeloom data show {self.name}` checks its files"
            )
        return found

    def _bounds(self, numbers: Tensor) -> list[slice]:
        """The range of each sample's tokens."""
        windows = self.order(numbers).tolist()
        if self.packs is not None:
            return [self.packs.bounds(window) for window in windows]
        return [slice(window * self.sequence, (window + 1) * self.sequence + 1) for window in windows]

    def _rows(self, bounds: list[slice], source: Array | Checked | Packs, fill: int) -> Tensor:
        """`[n, sequence + 1]` with one number per token."""
        found = np.full((len(bounds), self.sequence + 1), fill, np.int64)
        for row, where in zip(found, bounds, strict=True):
            row[: where.stop - where.start] = source[where]
        return torch.from_numpy(found)

    def order(self, numbers: Tensor) -> Tensor:
        """The window of each sample."""
        epochs, index = numbers // self.windows, numbers % self.windows
        for epoch in epochs.unique().tolist() if self.shuffled else []:
            here = epochs == epoch
            index[here] = Permutation(self.windows, counter.key(self.seed, "epoch", epoch))(index[here])
        return index if self.kept is None else torch.from_numpy(self.kept)[index]
