"""Parameters whose rows differ from those of the whole tensor: their blocks are filled from it and written as parts of
it.

If a weight is stored transposed, its columns are arranged: see `Arrangement.dim`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cubeloom.comm import Axis, Network
from cubeloom.parallel.arrangement import Arrangement, Run
from cubeloom.parallel.parameter import Block, block_of


@dataclass(frozen=True, eq=False)
class Arranged:
    """How the rows of a parameter are arranged."""

    arrangement: Arrangement
    network: Network  # can find the arrangement of tensors on its grid
    first: int  # the first row of this rank's block, of the arranged rows
    copies: Axis | None = None  # the ranks that have copies of the same rows

    def copied(self, gradient: Tensor, rows: slice) -> list[Tensor]:
        """The parts of the gradient of these rows for which other ranks also have partial sums, in their own memory."""
        dim = self.arrangement.dim
        first = self.first + (rows.start if dim == 0 else 0)
        runs = self.arrangement.runs(first, first + gradient.shape[dim])
        return [gradient.narrow(dim, run.start, run.length) for run in runs if run.copies > 1]


def arrangement_of(tensor: Tensor, network: Network) -> Arrangement | None:
    """How the rows of a parameter are arranged; None if they are those of the whole tensor, as for every buffer.

    The reducer of the parameter's gradient knows it, by identity. An attribute of a parameter would be lost by
    `model.to`, which puts another tensor into it, and a weak reference to a parameter forbids that.
    """
    if not isinstance(tensor, nn.Parameter):
        return None
    found = (gradients.arranged(tensor) for gradients in network.gradients)
    return next((each.arrangement for each in found if each is not None), None)


@dataclass(frozen=True)
class Lie:
    """The position in the whole tensor of this rank's part of a parameter, or of some of its rows."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]  # of the rows, in the arranged tensor
    runs: tuple[Run, ...]  # by row of the part
    dim: int = 0  # the dimension of these rows

    def offset_of(self, run: Run) -> tuple[int, ...]:
        """The offset in the whole tensor of a run that is not padding."""
        assert run.first is not None
        return (*self.offset[: self.dim], run.first, *self.offset[self.dim + 1 :])

    def parts(self, local: Tensor) -> Iterator[tuple[Run, Tensor]]:
        """The runs, each with its part of a tensor of this layout."""
        for run in self.runs:
            yield run, local.narrow(self.dim, run.start, run.length)


def lie_of(tensor: Tensor, network: Network, rows: slice | None = None) -> Lie:
    """The position of this rank's block, or of some of its rows."""
    block = block_of(tensor, network)
    if not block.shape:
        return Lie((), (), ())  # a scalar
    first, length = (0, block.local[0]) if rows is None else (rows.start, rows.stop - rows.start)
    offset, local = (block.offset[0] + first, *block.offset[1:]), (length, *block.local[1:])
    arrangement = arrangement_of(tensor, network)
    if arrangement is None:
        return Lie(block.shape, offset, (Run(0, length, offset[0]),))
    dim = arrangement.dim
    runs = arrangement.runs(offset[dim], offset[dim] + local[dim])
    return Lie(_with(block.shape, dim, arrangement.whole), offset, tuple(runs), dim)


def _with(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def block_values(fill: Callable[[str, Block], Tensor], name: str, block: Block, arrangement: Arrangement) -> Tensor:
    """The values of a block of the arranged tensor. `fill` is called for blocks of the whole tensor."""
    dim = arrangement.dim
    whole = _with(block.shape, dim, arrangement.whole)

    def rows(first: int, length: int) -> Tensor:
        return fill(name, Block(whole, _with(block.offset, dim, first), _with(block.local, dim, length)))

    runs = arrangement.runs(block.offset[dim], block.offset[dim] + block.local[dim])
    parts = {run: rows(run.first, run.length) for run in runs if run.first is not None}
    like = next(iter(parts.values())) if parts else rows(0, 1)  # for the dtype of a block that is only padding
    padding = (like.new_zeros(_with(block.local, dim, run.length)) for run in runs if run not in parts)
    return torch.cat([parts[run] if run in parts else next(padding) for run in runs], dim)
