"""A model as a row of pieces, between any two of which a pipeline can cut it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Carry = dict[str, Tensor]  # what one piece sends to the next; the last piece returns the loss
Data = Mapping[str, Tensor]  # a batch, with the names of the model's forward


@dataclass(frozen=True)
class Piece:
    """Some modules, by name, and their operation on the carry. Every parameter of a model is in some piece's modules."""

    modules: tuple[str, ...]
    run: Callable[[Carry, Data], Carry]
    whole: frozenset[str] = frozenset()  # of its new outputs, those that every device has whole
    # its losses, with the name of each one's targets in the data
    losses: Mapping[str, str] = field(default_factory=dict)


class InPieces(Protocol):
    """A model that can be cut into stages."""

    def pieces(self) -> list[Piece]: ...
