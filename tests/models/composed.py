"""A model's pieces, run one after the other."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from cubeloom.models.pieces import Carry, InPieces


def carries(model: InPieces, data: Mapping[str, Tensor]) -> list[Carry]:
    """What each piece hands on."""
    found: list[Carry] = [{}]
    for piece in model.pieces():
        found.append(piece.run(found[-1], data))
    return found[1:]
