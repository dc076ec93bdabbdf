"""A rank's part of a tensor: for each dimension an ordered list of factors, each cut over some axes of the grid.

A factor may consist of concatenated sections, of each of which a rank has an equal part: `[q | k | v]`.

A dimension has several factors if two dimensions were merged. For example, `[samples/z] x [heads/y]`, flattened, is
`samples/z · heads/y`. This is not a contiguous block, but it can be split again. In normal form a dimension has as few
factors as possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

Cutting = tuple[tuple[str, int], ...]  # axes and their sizes, outermost first


@dataclass(frozen=True, slots=True)
class Factor:
    """`size` is that of the whole. A tensor that is constant along a factor fits every cut into `ratio` parts."""

    size: int
    cutting: Cutting = ()
    ratio: int = 1
    sections: tuple[int, ...] = ()  # of unequal sizes; equal sections are two factors
    kept: tuple[int, ...] = ()  # the sections that every rank has whole

    @property
    def parts(self) -> int:
        return prod(size for _, size in self.cutting) * self.ratio if self.cutting else self.ratio

    def local(self, stop: int) -> int:
        """The number of a rank's elements before this position of the whole; with sections, the end of one."""
        if not self.kept:
            return stop // self.parts
        ends = accumulate(self.sections)
        found = [(size, end) for size, end in zip(self.sections, ends, strict=True) if end <= stop]
        return sum(size if number in self.kept else size // self.parts for number, (size, _) in enumerate(found))

    def __str__(self) -> str:
        if self.ratio > 1:
            return f"{self.size} (alike, 1/{self.ratio} on a rank)"
        if self.sections:
            sizes = [f"{size} whole" if number in self.kept else f"{size}" for number, size in enumerate(self.sections)]
            return f"({' | '.join(sizes)})/{named(self.cutting)}"
        return f"{self.size}/{named(self.cutting)}" if self.cutting else str(self.size)


Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Tracked:
    """What is known about a tensor of the rank's run."""

    dims: Dims
    summands: frozenset[str] = frozenset()  # axes along which each rank has a partial sum of its gradient
    makers: frozenset[str] = frozenset()  # the layers that it was computed from
    parameters: frozenset[str] = frozenset()  # the parameters, if it was computed from parameters and no layer's output

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return tuple(map(size_of, self.dims))

    @property
    def plain(self) -> bool:
        """Whether no axis cuts it and every rank has its whole gradient."""
        return not self.summands and not any(map(is_cut, self.dims))

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for dim in self.dims for factor in dim for axis, _ in factor.cutting)

    @property
    def of_samples(self) -> bool:
        """Whether it has something for each sample that data cuts, or repeats the same values for each."""
        alike = any(factor.ratio > 1 for factor in self.dims[0]) if self.dims else False
        return alike or "data" in self.axes

    def __str__(self) -> str:
        return described(self.dims)


def uncut(shape: Iterable[int]) -> Dims:
    return tuple(() if size == 1 else (Factor(size),) for size in shape)


def size_of(dim: Dim) -> int:
    return dim[0].size if len(dim) == 1 else prod(factor.size for factor in dim)


def parts_of(dim: Dim) -> int:
    return prod(factor.parts for factor in dim)


def is_cut(dim: Dim) -> bool:
    return any(factor.cutting or factor.ratio > 1 for factor in dim)


def local_shape(dims: Dims) -> tuple[int, ...]:
    return tuple(prod(factor.local(factor.size) for factor in dim) for dim in dims)


def named(cutting: Cutting) -> str:
    return "·".join(axis for axis, _ in cutting)


def axes_of(dim: Dim) -> str:
    """In words: `z·x`."""
    found = named(tuple(axis for factor in dim for axis in factor.cutting))
    return found or "the sizes of a rank"


def described(dims: Dims) -> str:
    """`[32/z·y, 16/x]`."""
    return f"[{', '.join(' x '.join(map(str, dim)) or '1' for dim in dims)}]"


def in_sections(sizes: Sequence[int], cutting: Cutting, kept: Sequence[int] = ()) -> Dim:
    """A dimension of concatenated sections. A rank has an equal part of each, or all of it if it is `kept`."""
    if len(kept) == len(sizes):
        return uncut([sum(sizes)])[0]
    if kept:
        return (Factor(sum(sizes), cutting, sections=tuple(sizes), kept=tuple(kept)),)
    if not cutting or len(sizes) == 1:
        return normal([Factor(sum(sizes), cutting)])
    if len(set(sizes)) == 1:
        return normal([Factor(len(sizes)), Factor(sizes[0], cutting)])
    return (Factor(sum(sizes), cutting, sections=tuple(sizes)),)


def cut_out(dim: Dim, start: int, stop: int) -> Dim | None:
    """The part from `start` to before `stop` of the whole dimension, if it consists of whole sections; otherwise None.

    On a rank's part it goes from `start / parts` to `stop / parts`.
    """
    if (start, stop) == (0, size_of(dim)) or not is_cut(dim):
        return dim if is_cut(dim) else uncut([stop - start])[0]
    first, rest = dim[0], dim[1:]
    if first.sections and not rest:
        ends = list(accumulate(first.sections, initial=0))
        if start in ends and stop in ends and start < stop:
            low, high = ends.index(start), ends.index(stop)
            kept = [number - low for number in first.kept if low <= number < high]
            return in_sections(first.sections[low:high], first.cutting, kept)
    size = size_of(rest)
    if first.parts == 1 and rest and not (start % size or stop % size) and start < stop:
        return normal([Factor((stop - start) // size), *rest])
    return None


def normal(factors: Iterable[Factor]) -> Dim:
    """The same dimension with as few factors as possible."""
    found: list[Factor] = []
    for factor in factors:
        if factor.size == 1:
            continue
        merged = _merged(found[-1], factor) if found else None
        if merged is None:
            found.append(factor)
        else:
            found[-1] = merged
    return tuple(found)


def _merged(outer: Factor, inner: Factor) -> Factor | None:
    size = outer.size * inner.size
    if outer.sections or inner.sections:
        if inner.cutting or inner.ratio > 1 or inner.sections:
            return None
        return replace(outer, size=size, sections=tuple(each * inner.size for each in outer.sections))
    if outer.ratio > 1 or inner.ratio > 1:
        return Factor(size, (), outer.ratio * inner.ratio) if outer.ratio > 1 and inner.ratio > 1 else None
    # A contiguous block of the outer factor is one of the product if the inner factor is whole or the block is a single
    # element.
    if not inner.cutting or outer.size == outer.parts > 1:
        return Factor(size, outer.cutting + inner.cutting)
    return None


def split(factor: Factor, outer: int) -> tuple[Factor, Factor] | None:
    """Split into a factor of size `outer` and the rest; None if a rank's block is not a block of both."""
    if factor.size % outer:
        return None
    rest = factor.size // outer
    if factor.sections:
        needed = [rest if number in factor.kept else rest * factor.parts for number in range(len(factor.sections))]
        if any(each % least for each, least in zip(factor.sections, needed, strict=True)):
            return None
        return replace(factor, size=outer, sections=tuple(each // rest for each in factor.sections)), Factor(rest)
    if factor.ratio > 1:
        return _split_alike(factor, outer, rest, factor.ratio)
    if outer % factor.parts == 0:
        return Factor(outer, factor.cutting), Factor(rest)
    parts = 1
    for place, (_, size) in enumerate(factor.cutting):
        if parts == outer and rest % prod(each for _, each in factor.cutting[place:]) == 0:
            return Factor(outer, factor.cutting[:place]), Factor(rest, factor.cutting[place:])
        parts *= size
    return None


def _split_alike(factor: Factor, outer: int, rest: int, ratio: int) -> tuple[Factor, Factor] | None:
    """If all elements are equal, any split works: the outer factor takes as much of the cut as it can."""
    most = max(each for each in range(1, ratio + 1) if ratio % each == 0 and outer % each == 0)
    if rest % (ratio // most):
        return None
    return Factor(outer, (), most), Factor(rest, (), ratio // most)


def common(first: Dim, second: Dim) -> Dim | None:
    """The cut that two dimensions of equal size share, if a rank has the same part of both."""
    if first == second:
        return first
    left, right, found = list(first), list(second), list[Factor]()
    while left and right:
        one, two = left.pop(0), right.pop(0)
        if one.size != two.size:
            smaller = min(one.size, two.size)
            outer, other = _cut_off(one, smaller, two), _cut_off(two, smaller, one)
            if outer is None or other is None:
                return None
            (one, left[:0]), (two, right[:0]) = outer, other
        alike = one.ratio > 1 or two.ratio > 1
        lie = [(each.cutting, each.sections, each.kept) for each in (one, two)]
        if one.parts != two.parts or (lie[0] != lie[1] and not alike):
            return None
        found.append(two if one.ratio > 1 else one)
    return normal(found)


def _cut_off(factor: Factor, size: int, like: Factor) -> tuple[Factor, list[Factor]] | None:
    """The outermost part of a factor, and the rest."""
    if factor.size == size:
        return factor, []
    if factor.ratio > 1:  # constant: cut like the other one
        if factor.size % size or factor.ratio % like.parts:
            return None
        parts = like.parts
        return Factor(size, (), parts), [Factor(factor.size // size, (), factor.ratio // parts)]
    pair = split(factor, size)
    return None if pair is None else (pair[0], [pair[1]])


def regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """The same elements in the same order with another shape; None if a rank's part is not a part of that."""
    if 0 in shape:
        return None if any(map(is_cut, dims)) else uncut(shape)
    if prod(map(size_of, dims)) != prod(shape):
        return None
    queue = list(normal(factor for dim in dims for factor in dim))
    found: list[Dim] = []
    for size in shape:
        taken: list[Factor] = []
        while size > 1:
            factor = queue.pop(0)
            if factor.size <= size:
                if size % factor.size:
                    return None
                taken.append(factor)
                size //= factor.size
                continue
            pair = split(factor, size)
            if pair is None:
                return None
            taken.append(pair[0])
            queue.insert(0, pair[1])
            break
        found.append(normal(taken))
    return tuple(found)
