"""How the outputs of a tensor are arranged before a grid cuts them, if the whole tensor cannot be cut directly. Values
only.

Outputs are the rows of a weight, or its columns if it is stored transposed; then read columns for rows.

A grid cuts rows evenly. Users, checkpoints and the serial model have a *whole* tensor. The tensor that the ranks of a
cube *hold* together may have other rows: rows of the whole, copies of some, and padding, which is zero and stays zero.

    whole  [383, K]                    on y=2·z=2
    held   [384, K]                    383 rows of the whole, one of padding; each rank has 96 of the 384

    whole  [q | k | v, K]              on y=2, of three sections
    held   [q0 | k0 | v0 | q1 | k1 | v1, K]    each rank has its half of every section

A short list of `Run`s maps a rank's block to the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Run:
    """Consecutive rows, from `start` on in the held tensor and from `first` on in the whole; padding if `first` is
    None.

    If rows have several `copies`, the one that `counts` is saved.
    """

    start: int
    length: int
    first: int | None
    copies: int = 1
    counts: bool = True

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Arrangement:
    """The held rows of a tensor with `whole` rows, from first to last."""

    whole: int
    segments: tuple[Run, ...]
    dim: int = 0  # the dimension of these rows

    @classmethod
    def of(cls, whole: int, segments: Iterator[Run]) -> Arrangement:
        """From segments in order. Their starts are computed here."""
        placed, start = [], 0
        for each in segments:
            placed.append(replace(each, start=start))
            start += each.length
        return cls(whole, tuple(placed))

    @property
    def held(self) -> int:
        """The number of rows of all ranks together, with copies and padding."""
        return self.segments[-1].stop

    @property
    def copies(self) -> int:
        """The number of copies of each copied row; 1 if there are none."""
        return max(segment.copies for segment in self.segments)

    def runs(self, start: int, stop: int) -> list[Run]:
        """The held rows from `start` to before `stop`. The starts of the runs are counted from `start`."""
        found = []
        for segment in self.segments:
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                first = None if segment.first is None else segment.first + low - segment.start
                found.append(replace(segment, start=low - start, length=high - low, first=first))
        return found

    def filled(self, start: int, stop: int) -> int:
        """The number of these held rows that are not padding."""
        return sum(run.length for run in self.runs(start, stop) if run.first is not None)


def padded(rows: int, parts: int) -> Arrangement | None:
    """Padding at the end, so that the rows can be cut into equal parts; None if none is needed."""
    missing = -rows % parts
    return Arrangement.of(rows, iter([Run(0, rows, 0), Run(0, missing, None)])) if missing else None


def sectioned(sizes: Sequence[int], parts: int, copies: Sequence[int]) -> Arrangement | None:
    """Concatenated sections: each of the parts has a part of every section, in order. None if that is the whole tensor.

    Of a section with copies, that many consecutive parts have the same rows. The first of them counts.
    """
    if parts == 1 or len(sizes) == 1:
        return None

    def segments() -> Iterator[Run]:
        for part in range(parts):
            before = 0
            for size, shared in zip(sizes, copies, strict=True):
                length = size * shared // parts
                yield Run(0, length, before + part // shared * length, shared, counts=part % shared == 0)
                before += size

    return Arrangement.of(sum(sizes), segments())


def exchanged(rows: int, outer: int, inner: int, of: Arrangement | None = None) -> Arrangement | None:
    """For two axes that cut the rows, the outer one first, although a grid's blocks have the inner one first.

    `of`: the arrangement of the rows before. None if the order of the axes makes no difference.
    """
    if outer == 1 or inner == 1:
        return of
    before = of or Arrangement.of(rows, iter([Run(0, rows, 0)]))
    part = before.held // (outer * inner)

    def segments() -> Iterator[Run]:
        for first in range(inner):
            for second in range(outer):
                place = (second * inner + first) * part
                yield from before.runs(place, place + part)

    return replace(Arrangement.of(before.whole, segments()), dim=before.dim)
