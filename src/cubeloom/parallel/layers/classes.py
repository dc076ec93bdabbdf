"""The classes of a loss, of which each rank of y has some: the logits of one rank end before its padding, if it has any.

A rank may have nothing but padding, and so no logits at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cubeloom.comm import Axis
from cubeloom.parallel.arrangement import Arrangement


@dataclass(frozen=True)
class Classes:
    """`count` are those that there are; this rank's are those from `first` on; `part` of them, with padding, on each rank."""

    count: int
    first: int
    part: int = 0

    @classmethod
    def of(cls, arrangement: Arrangement, axis: Axis) -> Classes:
        part = arrangement.held // axis.size
        return cls(arrangement.whole, axis.index * part, part)

    @classmethod
    def even(cls, own: int, axis: Axis) -> Classes:
        """Where every rank of the axis has as many as this one."""
        return cls(own * axis.size, axis.index * own, own)

    def own(self, targets: Tensor, logits: int) -> tuple[Tensor, Tensor]:
        """The place of each target among this rank's logits, one that exists in any case; and whether it is there."""
        local = targets - self.first
        return local.clamp(0, max(logits - 1, 0)), (local >= 0) & (local < logits)


def largest_of(logits: Tensor) -> Tensor:
    """The largest of each row."""
    return logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -float("inf"))


def value_at_target(values: Tensor, safe: Tensor, here: Tensor) -> Tensor:
    """What each row has at its target; 0 where that is not `here`."""
    if not values.shape[-1]:
        return values.new_zeros(values.shape[:-1])
    return values.gather(-1, safe.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
