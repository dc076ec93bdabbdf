"""Adapts any model to the interface of `continue_`: tokens in, the logits of each of them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError

_ANY = 2**30


class AsDecoder(nn.Module):
    def __init__(self, model: nn.Module, tokens: str, positions: int | None) -> None:
        """`tokens`: the name of the forward's argument."""
        super().__init__()
        self.model, self._tokens = model, tokens
        self.positions_most = positions or _ANY

    def forward(self, tokens: Tensor) -> Tensor:
        """From `[1, sequence]` to `[sequence, vocabulary]`."""
        found = _logits(self.model(**{self._tokens: tokens}))
        if found is None or found.dim() < 2:
            raise UserError(
                f"{type(self.model).__name__}.forward gives no logits where it is called with {self._tokens} alone: let it give"
                " them, or an object that has them as `logits`, where there are no targets"
            )
        return found.reshape(tokens.shape[1], -1)


def _logits(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        output = output.get("logits")
    output = getattr(output, "logits", output)
    if isinstance(output, tuple | list):
        output = next((each for each in output if isinstance(each, Tensor) and each.dim() > 1), None)
    return output if isinstance(output, torch.Tensor) else None
