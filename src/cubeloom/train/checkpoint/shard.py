"""A block of a tensor: what one rank holds of it, and its position in the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from cubeloom.parallel.arranged import Lie
from cubeloom.parallel.arrangement import Run


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part, from `offset` on, of a tensor of the shape `whole`. Equal shards are written once.

    `runs`: the positions of the rows of its dimension `dim`, unless they are consecutive from `offset` on. Some may be
    padding, and some copies of another rank's rows.
    """

    local: Tensor
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    runs: tuple[Run, ...] | None = None
    dim: int = 0

    @classmethod
    def of(cls, local: Tensor, whole: tuple[int, ...], offset: tuple[int, ...]) -> Shard:
        """Shares memory with the local tensor, so that loading into the shard fills the tensor."""
        return cls(local.detach(), whole, offset)

    @classmethod
    def lying(cls, local: Tensor, lie: Lie) -> Shard:
        """The same for a tensor with arranged rows."""
        return cls(local.detach(), lie.whole, lie.offset, lie.runs or None, lie.dim)

    def pieces(self) -> Iterator[Shard]:
        """Shards with consecutive rows: everything except padding."""
        if self.runs is None:
            yield self
            return
        for run in self.runs:
            if run.first is not None:
                yield self._piece(run.start, run.length, run.first)

    def written(self) -> Iterator[Shard]:
        """What is saved of it, in as few shards as possible: of copied rows only those that count."""
        if self.runs is None:
            yield self
            return
        start, first, length = 0, 0, 0
        for run in self.runs:
            if run.first is None or not run.counts:
                continue
            if (run.start, run.first) != (start + length, first + length):
                if length:
                    yield self._piece(start, length, first)
                start, first, length = run.start, run.first, 0
            length += run.length
        if length:
            yield self._piece(start, length, first)

    def _piece(self, start: int, length: int, first: int) -> Shard:
        offset = (*self.offset[: self.dim], first, *self.offset[self.dim + 1 :])
        return Shard(self.local.narrow(self.dim, start, length), self.whole, offset)
