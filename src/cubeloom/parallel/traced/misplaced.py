"""What a rank's run reports to the search: a refused operation, and the losses that it saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cubeloom.parallel.check.record import Entry
from cubeloom.parallel.check.tracked import Dims, Tracked
from cubeloom.parallel.cut import CutError

_FEW = 4  # the most sections into which a view splits the outputs of a layer
# The operations that repeat keys, [samples, heads, tokens, features]: each head once for each query that shares it.
REPEATS = ("getitem", "expand", "reshape")
_VIEWS = ("view", "reshape", "unflatten")


@dataclass(frozen=True)
class LossUse:
    """A cross-entropy between layers: of a layer's cut logits, or of whole ones."""

    head: str | None
    rows: int
    nbytes: int  # per element
    smoothing: float


class Misplaced(CutError):
    """An operation that needs its inputs in another layout, and what the search may change."""

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
        self.reached = reached  # the number of correct operations before
        self.makers = makers  # layers whose outputs it takes
        self.used = used  # those of them of whose gradient each rank would have a partial sum
        self.module = module  # the innermost running module
        self.sections = sections  # the sizes into which it splits its last dimension
        self.by_numbers = by_numbers  # it takes sizes
        self.tensors = tensors
        self.arguments = arguments  # of the module, those that may be cut
        self.split = split  # the two sizes into which a view splits its last dimension
        self.around = around  # makers of the arguments of each running module, the innermost first


def split_of(entry: Entry) -> tuple[int, int] | None:
    """The two sizes into which a view splits the last dimension of its tensor."""
    if entry.name not in _VIEWS or not entry.input_shapes:
        return None
    before, after = entry.input_shapes[0], entry.shapes[0]
    fits = len(after) == len(before) + 1 and after[:-2] == before[:-1]
    return (after[-2], after[-1]) if fits else None


def sections_of(entry: Entry) -> tuple[int, ...]:
    """How an operation splits the last dimension of its tensor in the serial model."""
    if not entry.input_shapes:
        return ()
    size = entry.input_shapes[0][-1] if entry.input_shapes[0] else 0
    lasts = [shape[-1] for shape in entry.shapes if shape]
    if entry.name in ("split", "chunk", "tensor_split", "split_with_sizes") and sum(lasts) == size:
        return tuple(lasts)
    if entry.name == "getitem" and entry.numbers and isinstance(last := entry.numbers[-1], slice):
        start, stop, step = last.indices(size)
        ends = sorted({0, start, stop, size})
        return tuple(right - left for left, right in pairwise(ends)) if step == 1 else ()
    if entry.name in _VIEWS and len(entry.shapes[0]) > len(entry.input_shapes[0]):
        first = entry.shapes[0][len(entry.input_shapes[0]) - 1]
        return (size // first,) * first if 1 < first <= _FEW and size % first == 0 else ()
    return ()


def repeated(entries: Sequence[Entry]) -> int:
    """How often these operations repeat each head of keys; 0 where they do something else."""
    if tuple(each.name for each in entries) != REPEATS:
        return 0
    before, wide, after = entries[0].input_shapes[0], entries[1].shapes[0], entries[2].shapes[0]
    if len(before) != 4 or len(wide) != 5:
        return 0
    samples, heads, *rest = before
    times = wide[2]
    return times if (wide, after) == ((samples, heads, times, *rest), (samples, heads * times, *rest)) else 0
