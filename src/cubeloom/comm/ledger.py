"""The exact record of every communication of a rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

# What a rank receives of a message of `size` bytes in a group of g ranks, in units of (g-1)/g · size: ring collectives.
# For rooted ones it is the mean over the ranks when each is the root once (pipelined, so nothing is received twice).
_RINGS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "reduce": 1}
# For these `size` is the number of bytes that arrive from other ranks. A send is counted at its receiver.
_DIRECT = {"all_to_all": 1, "receive": 1, "send": 0}


@dataclass(frozen=True)
class Entry:
    """One communication. `size`: bytes of the whole tensor that the group gathers or reduces, or of the message."""

    operation: str
    axis: str
    ranks: int
    size: int
    origin: str

    @property
    def received(self) -> Fraction:
        """Bytes that this rank receives; a fraction if a ring's chunks are not whole bytes."""
        if self.operation in _DIRECT:
            return Fraction(_DIRECT[self.operation] * self.size)
        return _RINGS[self.operation] * Fraction(self.size * (self.ranks - 1), self.ranks)


@dataclass
class Ledger:
    entries: list[Entry] = field(default_factory=list)

    def by_axis(self) -> dict[str, Fraction]:
        """Bytes received along each axis."""
        total: dict[str, Fraction] = defaultdict(Fraction)
        for entry in self.entries:
            total[entry.axis] += entry.received
        return dict(total)


def plain(number: Fraction) -> int | float:
    """For people and JSON: an integer if the number of bytes is whole."""
    return int(number) if number.denominator == 1 else float(number)
