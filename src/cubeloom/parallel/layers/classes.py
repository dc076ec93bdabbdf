"""The classes of a loss, cut over y. If the vocabulary is padded, the logits of a rank end before its padding.

A rank may have nothing but padding, and so no logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cubeloom.comm import Axis
from cubeloom.parallel.arrangement import Arrangement


@dataclass(frozen=True)
class Classes:
    """`count`: number of classes. This rank has those from `first` on; `part`: classes per rank, with padding."""

    count: int
    first: int
    part: int = 0

    @classmethod
    def of(cls, arrangement: Arrangement, axis: Axis) -> Classes:
        part = arrangement.held // axis.size
        return cls(arrangement.whole, axis.index * part, part)

    @classmethod
    def even(cls, own: int, axis: Axis) -> Classes:
        """The same number of classes on every rank of the axis as on this one."""
        return cls(own * axis.size, axis.index * own, own)

    def own(self, targets: Tensor, logits: int) -> tuple[Tensor, Tensor]:
        """The index of each target among this rank's logits (a valid one in any case), and whether the target is here."""
        local = targets - self.first
        return local.clamp(0, max(logits - 1, 0)), (local >= 0) & (local < logits)


def largest_of(logits: Tensor) -> Tensor:
    """The maximum of each row."""
    return logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -float("inf"))


def value_at_target(values: Tensor, safe: Tensor, here: Tensor) -> Tensor:
    """The value at each row's target; 0 where the target is not `here`."""
    if not values.shape[-1]:
        return values.new_zeros(values.shape[:-1])
    return values.gather(-1, safe.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
