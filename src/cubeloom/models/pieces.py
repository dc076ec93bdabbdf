"""A model as a row of pieces, so that a pipeline can cut it between any two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Carry = dict[str, Tensor]  # what one piece hands to the next; the last one hands out the loss
Data = Mapping[str, Tensor]  # a batch, as the model's forward names it


@dataclass(frozen=True)
class Piece:
    """Some modules, by name, and what they do to the carry. All of a model's parameters are in some piece's modules."""

    modules: tuple[str, ...]
    run: Callable[[Carry, Data], Carry]
    whole: frozenset[str] = frozenset()  # of what it hands on for the first time, what no device has only a part of
    losses: Mapping[str, str] = field(default_factory=dict)  # its losses, and which of the data has each one's targets


class InPieces(Protocol):
    """A model that can be cut into stages."""

    def pieces(self) -> list[Piece]: ...
