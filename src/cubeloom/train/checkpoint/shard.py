"""A block of a tensor: what one rank holds of it, and where in the whole that lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from cubeloom.parallel.arranged import Lie
from cubeloom.parallel.arrangement import Run


@dataclass(frozen=True, eq=False)
class Shard:
    """What this rank holds, from `offset` on, of a tensor of the shape `whole`. Equal shards are written once.

    `runs`: where its rows lie, unless they lie as they are from `offset` on: some may be padding, and some copies of rows that
    another rank has.
    """

    local: Tensor
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    runs: tuple[Run, ...] | None = None

    @classmethod
    def of(cls, local: Tensor, whole: tuple[int, ...], offset: tuple[int, ...]) -> Shard:
        """Shares memory with the local tensor, so that what is loaded into it is there."""
        return cls(local.detach(), whole, offset)

    @classmethod
    def lying(cls, local: Tensor, lie: Lie) -> Shard:
        """The same, wherever its rows lie."""
        return cls(local.detach(), lie.whole, lie.offset, lie.runs or None)

    def pieces(self) -> Iterator[Shard]:
        """Shards whose rows lie as they are: all of it but padding."""
        if self.runs is None:
            yield self
            return
        for run in self.runs:
            if run.first is not None:
                yield self._piece(run.start, run.length, run.first)

    def written(self) -> Shard | None:
        """What is saved of it: of rows of which there are copies, those that count. None where there is nothing to save."""
        if self.runs is None:
            return self
        counted = [run for run in self.runs if run.first is not None and run.counts]
        if not counted:
            return None
        (start, first), length = (counted[0].start, counted[0].first), 0
        assert first is not None
        for run in counted:
            if (run.start, run.first) != (start + length, first + length):
                raise AssertionError(f"rows that count do not lie one behind another: {self.runs}")
            length += run.length
        return self._piece(start, length, first)

    def _piece(self, start: int, length: int, first: int) -> Shard:
        return Shard(self.local[start : start + length], self.whole, (first, *self.offset[1:]))
