"""One operation of the rank's run together with the same one of the whole run: the argument of a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cubeloom.parallel.check.tracked import Dim, Dims, Tracked, axes_of, cut_out, is_cut, parts_of

Shape = tuple[int, ...]


class Refused(Exception):
    """Says why an operation differs from the serial model. The code that catches it adds file and line.

    `used`: tensors replicated over ranks that would each have a partial sum of their gradient.
    """

    def __init__(self, why: str, used: Sequence[Tracked] = ()) -> None:
        super().__init__(why)
        self.used = used


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Sequence[Tracked]  # its tensors, in order
    needs_gradient: Sequence[bool]
    of: Callable[[Tensor], Tracked]
    whole_numbers: Sequence[Any]  # its other arguments, in the whole run
    numbers: Sequence[Any]  # and in the rank's run
    whole: Sequence[Shape]  # shapes of the results
    local: Sequence[Shape] | None  # None if torch refuses the local sizes
    averaged: bool = False  # gradients of what is repeated per sample are averaged over ranks

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        if len(self.args) > place:
            return self.args[place]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    @property
    def only(self) -> Tracked:
        """The tensor of an operation that has one."""
        if len(self.inputs) != 1:
            raise Refused(f"{self.name} of {len(self.inputs)} tensors has no rule, of which {self.inputs[0]} is cut")
        return self.inputs[0]

    @property
    def same_numbers(self) -> bool:
        return alike(self.whole_numbers, self.numbers)

    def refuse_other_numbers(self) -> None:
        """Refuse a number that was computed from a local size."""
        if not self.same_numbers:
            whole, own = next(
                (
                    (first, second)
                    for first, second in zip(self.whole_numbers, self.numbers, strict=False)
                    if not alike(first, second)
                ),
                (self.whole_numbers, self.numbers),
            )
            raise Refused(
                f"{self.name} is given {own!r} on a rank and {whole!r} in the serial model: a number made from the size of what"
                " a rank has a part of"
            )


Rule = Callable[[Step], "list[Dims]"]


def alike(first: Any, second: Any) -> bool:
    """Equal numbers of equal types; other arguments must be identical."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(alike, first, second))
    try:
        return bool(first == second)
    except Exception:  # a type that cannot be compared
        return False


def parts_in_words(dim: Any) -> str:
    """`y cuts`, with the number of ranks."""
    return f"{axes_of(dim)} cut" + ("" if "·" in axes_of(dim) or " " in axes_of(dim) else "s")


def refuse_cut(step: Step, tracked: Tracked, dims: Sequence[int], consequence: str) -> None:
    """Refuse unless all these dimensions are whole."""
    for place in dims:
        dim = tracked.dims[place]
        if is_cut(dim):
            raise Refused(
                f"{step.name} over dimension {place} of {tracked}, which {parts_in_words(dim)}: each of {parts_of(dim)} ranks"
                f" would {consequence}"
            )


# Start and end in a dimension; the end is excluded.
Span = tuple[int, int]


def spans(
    step: Step, tracked: Tracked, place: int, whole: Sequence[Span], own: Sequence[Span] | None, consequence: str
) -> list[Dim]:
    """The part taken of a dimension, on the whole and on a rank: everything, or whole sections.

    If no axis cuts the dimension, it may be any part, and must be the same on the rank.
    """
    dim = tracked.dims[place]
    found = [cut for each in whole if (cut := cut_out(dim, *each)) is not None]
    if len(found) < len(whole):
        refuse_cut(step, tracked, [place], consequence)
    parts = parts_of(dim)
    local = dim[0].local if len(dim) == 1 else (lambda stop: stop // parts)
    expected = [(local(start), local(stop)) for start, stop in whole]
    if own is None or list(own) != expected:
        taken = "torch refuses it on a rank" if own is None else f"a rank takes {_in_words(own)} of its part"
        raise Refused(
            f"{step.name} takes {_in_words(whole)} of dimension {place} of {tracked} in the serial model, and {taken}, where"
            f" that is {_in_words(expected)}: make these numbers from the size that the tensor has"
        )
    return found


def _in_words(some: Sequence[Span]) -> str:
    return " and ".join(f"{start} to {stop}" for start, stop in some)


def place_of(dim: int, count: int) -> int:
    return dim + count if dim < 0 else dim


def places_of(dims: Any, count: int) -> tuple[int, ...]:
    """From an int, several ints, or None for all dimensions."""
    if isinstance(dims, bool) or dims is None:
        return tuple(range(count))
    if isinstance(dims, int):
        return (place_of(dims, count),)
    return tuple(place_of(dim, count) for dim in dims) or tuple(range(count))
