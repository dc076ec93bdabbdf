"""A block of a tensor: what one rank holds of it, and where in the whole that lies."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shard:
    """What this rank holds, from `offset` on, of a tensor of the shape `whole`. Equal shards are written once."""

    local: Tensor
    whole: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def of(cls, local: Tensor, whole: tuple[int, ...], offset: tuple[int, ...]) -> Shard:
        """Shares memory with the local tensor, so that what is loaded into it is there."""
        return cls(local.detach(), whole, offset)
