"""Ranks agree by name on the parameters that a backward used: each rank's own samples may choose modules."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.parallel.gradients import AnyRank
from cubeloom.parallel.weight import PrefetchOrder


def agreement(network: Network, prefetch_order: PrefetchOrder) -> AnyRank | None:
    """Called by all ranks at the end of a backward. None if there is only one rank."""
    if network.grid.world == 1 or network.rehearsed:
        return None
    prefetch_order.begin_log()
    return _Agreement(network, prefetch_order)


@dataclass(frozen=True)
class _Agreement:
    network: Network
    prefetch_order: PrefetchOrder

    def __call__(self, names: list[set[str]]) -> list[set[str]]:
        gathers, host_group = self.prefetch_order.take_log(), self.network.host_group
        mine = repr(([sorted(some) for some in names], gathers))
        if host_group.alike(blake2b(mine.encode(), digest_size=16).digest()):
            return names
        found: list[tuple[list[set[str]], list[str]]] = host_group.gather((names, gathers))
        for rank, (_, theirs) in enumerate(found):
            _check(found[0][1], theirs, rank)
        return [set().union(*alike) for alike in zip(*(sets for sets, _ in found), strict=True)]


def _check(first: list[str], other: list[str], rank: int) -> None:
    """Weights that are sharded over z are gathered by all ranks together, in the same order."""
    if first != other:
        place = next((n for n, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), None)
        place = min(len(first), len(other)) if place is None else place
        mine, theirs = (log[place] if place < len(log) else "nothing more" for log in (first, other))
        raise UserError(
            f"ranks 0 and {rank} used different layers whose weights are sharded over z: rank 0 gathered {mine} where rank "
            f"{rank} gathered {theirs}; a layer that only some ranks use needs weights='replicated' or z=1"
        )
