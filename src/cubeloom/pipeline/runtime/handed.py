"""What stages hand to one another, in numbers, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn

from cubeloom.base.grid import Grid
from cubeloom.models.pieces import Carry, Piece
from cubeloom.parallel.cut import Side
from cubeloom.parallel.forms import Batch, EmbeddingForm, Form, LinearForm, Spread, other
from cubeloom.parallel.image_forms import GroupedForm, ImageForm, SliceForm, StayForm
from cubeloom.pipeline.runtime.partition import belongs


@dataclass(frozen=True)
class Handed:
    """One tensor: how many numbers a sample has of it, and the side on which its features lie; None if they are whole."""

    per_sample: int
    side: Side | None
    rows: Spread

    def numbers(self, grid: Grid, batch: Batch) -> Fraction:
        """On one rank."""
        count = Fraction(self.per_sample * batch.samples_of(grid))
        if self.side is None:
            return count
        return count / grid.size(self.side) / (grid.size(other(self.side)) if self.rows == Spread.ROWS else 1)


def handed_on(model: nn.Module, forms: Sequence[Form], batch: Batch) -> list[tuple[Handed, ...]]:
    """What each piece of a model hands to the next."""
    pieces: list[Piece] = model.pieces()  # type: ignore[operator]
    if not hasattr(model, "example"):
        # A Transformer hands on the residual stream, which is what its embedding gives.
        embedding = next(form for form in forms if isinstance(form, EmbeddingForm))
        return [(Handed(batch.sequence * embedding.features, "x", embedding.rows),)] * len(pieces)
    samples = 2
    data = model.example(samples)  # type: ignore[operator]
    carry: Carry = {}
    known: dict[str, Handed] = {}
    found = []
    for piece in pieces:
        before = carry
        with torch.no_grad():
            carry = piece.run(before, data)
        side, rows = _side_after([form for form in forms if belongs(form.name, piece.modules)])
        for name, tensor in carry.items():
            if tensor is not before.get(name):
                known[name] = Handed(tensor.numel() // samples, None if name in piece.whole else side, rows)
        found.append(tuple(known[name] for name in carry))
    return found


def _side_after(forms: Sequence[Form]) -> tuple[Side, Spread]:
    """Where the last of these layers leaves features, and whether it cuts rows further."""
    for form in reversed(forms):
        if isinstance(form, LinearForm):
            return form.bias_axis, form.outputs
        if isinstance(form, SliceForm | StayForm | GroupedForm):
            return form.side, form.rows
    stream = next(form for form in forms if isinstance(form, ImageForm))
    return stream.side, stream.rows
