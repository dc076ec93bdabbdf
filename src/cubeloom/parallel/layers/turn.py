"""Redistribute an activation in the plane of x and y, so that its features are cut by the other axis.

Before, rank (ix, iy) has part ix of X of its z rank's rows and part iy of Y of the features. After, it has part iy of Y
of the rows and part ix of X of the features. Each pair of ranks exchanges the overlap of one's old block and the
other's new block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cubeloom.comm import Axis, Network
from cubeloom.parallel.specs import Side


class Turn:
    """`side`: the axis that cuts the features afterwards, x or y. The description above is for x."""

    def __init__(self, name: str, network: Network, side: Side = "x") -> None:
        self._onto_x = side == "x"
        self._origin = f"{name} turn"
        self._plane: Axis = network.axis("x", "y")
        self._sizes = network.grid.x, network.grid.y
        self._here = network.coordinates["x"], network.coordinates["y"]

    def __call__(self, block: Tensor) -> Tensor:
        """`[M/(z·x), N/y, …]` -> `[M/(z·y), N/x, …]`."""
        return block if self._plane.size == 1 else _Turn.apply(block, self)

    def move(self, block: Tensor, back: bool) -> Tensor:
        forward = self._onto_x is not back
        columns, rows = self._sizes if forward else self._sizes[::-1]
        here = self._here if forward else self._here[::-1]
        # In the backward x and y change roles. `columns` is the old number of parts of rows, `rows` the new one.
        height, width = block.shape[0] * columns, block.shape[1] * rows
        old = _Part(here[0], columns, height), _Part(here[1], rows, width)
        new = _Part(here[1], rows, height), _Part(here[0], columns, width)
        outgoing, arriving = [], []
        for x in range(self._sizes[0]):
            for y in range(self._sizes[1]):
                there = (x, y) if forward else (y, x)
                theirs_new = _Part(there[1], rows, height), _Part(there[0], columns, width)
                theirs_old = _Part(there[0], columns, height), _Part(there[1], rows, width)
                outgoing.append(block[_within(old, theirs_new)].flatten())
                arriving.append(_within(new, theirs_old))
        out = block.new_empty(new[0].size, new[1].size, *block.shape[2:])
        sizes = [out[where].numel() for where in arriving]
        joined = self._plane.all_to_all(outgoing, sizes, f"{self._origin} {'backward' if back else 'forward'}").wait()
        for where, piece in zip(arriving, joined.split(sizes), strict=True):
            out[where] = piece.view_as(out[where])
        return out


class _Part:
    """Part `index` of `parts` of `length` rows or features."""

    def __init__(self, index: int, parts: int, length: int) -> None:
        self.size = length // parts
        self.start = index * self.size
        self.stop = self.start + self.size


def _within(mine: tuple[_Part, _Part], other: tuple[_Part, _Part]) -> tuple[slice, slice]:
    """The overlap of my block with the other, as slices of mine; empty if they are disjoint."""
    rows, features = (
        slice(
            max(part.start, that.start) - part.start,
            max(max(part.start, that.start), min(part.stop, that.stop)) - part.start,
        )
        for part, that in zip(mine, other, strict=True)
    )
    return rows, features


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, turn: Turn) -> Tensor:
        ctx.turn = turn
        return turn.move(block, back=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.turn.move(gradient, back=True), None
