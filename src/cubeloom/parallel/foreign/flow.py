"""What lies between layers: the output of one or several, and what was computed from it feature by feature."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Flow:
    """`makers` are the layers it comes from, `takers` those that get it as it is cut."""

    makers: set[str]
    dim: int  # that is features
    takers: set[str] = field(default_factory=set)
    broken: str | None = None  # why it must be whole, in words
    _into: Flow | None = None  # the flow that has taken this one up

    @property
    def root(self) -> Flow:
        return self if self._into is None else self._into.root

    def cut(self) -> bool:
        """Somebody takes it, and nobody needs it whole."""
        return self.broken is None and bool(self.takers)

    def stop(self, why: str) -> None:
        root = self.root
        root.broken = root.broken or why

    def merge(self, other: Flow) -> None:
        """Two flows that were multiplied, say, are one from there on."""
        mine, theirs = self.root, other.root
        if mine is not theirs:
            mine.makers |= theirs.makers
            mine.takers |= theirs.takers
            mine.broken = mine.broken or theirs.broken
            theirs._into = mine
