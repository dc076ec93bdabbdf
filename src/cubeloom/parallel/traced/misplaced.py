"""What the run as a rank tells the search: an operation that was refused, and losses that it saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cubeloom.parallel.check.tracked import Dims, Tracked
from cubeloom.parallel.cut import CutError


@dataclass(frozen=True)
class LossUse:
    """A cross-entropy between layers: of the logits of a layer that gives its classes cut, or of whole ones."""

    head: str | None
    rows: int
    nbytes: int  # of one of its numbers
    smoothing: float


class Misplaced(CutError):
    """An operation that needs what it is given in another way, and what the search may change."""

    def __init__(
        self,
        why: str,
        place: str,
        reached: int,
        makers: frozenset[str],
        used: frozenset[str],
        module: str | None,
        sections: tuple[int, ...],
        by_numbers: bool,
        tensors: Sequence[Tracked],
        arguments: Mapping[str | int, Dims],
        around: Sequence[frozenset[str]] = (),
        split: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(f"{place}: {why}" if place else why)
        self.why = why
        self.reached = reached  # how many operations were right before
        self.makers = makers  # layers whose outputs it is given
        self.used = used  # of these, those of whose gradient each rank would have a summand
        self.module = module  # the innermost one whose code is running
        self.sections = sections  # sizes that its last dimension is taken apart into
        self.by_numbers = by_numbers  # it takes sizes
        self.tensors = tensors
        self.arguments = arguments  # of the module, those that may be cut
        self.split = split  # the two sizes that a view takes its last dimension apart into
        self.around = around  # makers of what each running module was given, the innermost first
