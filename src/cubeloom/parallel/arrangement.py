"""How the outputs of a tensor are arranged before a grid cuts them, where those of the whole would not do. Values only.

Outputs are the rows of a weight, and where it is stored transposed its columns: read columns for rows then.

A grid cuts rows evenly. Users, checkpoints and the serial model know a *whole* tensor; what the ranks of a cube *hold*
together may have other rows: some of the whole's, some copies of them, and padding, which is zero and stays zero.

    whole  [383, K]                    on y=2·z=2
    held   [384, K]                    383 rows of the whole, one of padding; each rank has 96 of the 384

    whole  [q | k | v, K]              on y=2, of three sections
    held   [q0 | k0 | v0 | q1 | k1 | v1, K]    each rank has its half of every section

What a rank's block means in the whole tensor is a short list of `Run`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Run:
    """Rows one behind another, from `start` on in what is held: from `first` on in the whole, or padding if that is None.

    Of rows that have several `copies` one is what is saved: the one that `counts`.
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
    """Of a tensor with so many rows in the `whole`: what is held, from its first row to its last."""

    whole: int
    segments: tuple[Run, ...]
    dim: int = 0  # of the tensor, that these rows are

    @classmethod
    def of(cls, whole: int, segments: Iterator[Run]) -> Arrangement:
        """Segments in their order; where each starts is found here."""
        placed, start = [], 0
        for each in segments:
            placed.append(replace(each, start=start))
            start += each.length
        return cls(whole, tuple(placed))

    @property
    def held(self) -> int:
        """Rows that the ranks have together, copies and padding included."""
        return self.segments[-1].stop

    @property
    def copies(self) -> int:
        """Of each row that is copied; 1 where none is."""
        return max(segment.copies for segment in self.segments)

    def runs(self, start: int, stop: int) -> list[Run]:
        """What the held rows from `start` to before `stop` are; their own starts are counted from `start`."""
        found = []
        for segment in self.segments:
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                first = None if segment.first is None else segment.first + low - segment.start
                found.append(replace(segment, start=low - start, length=high - low, first=first))
        return found

    def filled(self, start: int, stop: int) -> int:
        """How many of these held rows are not padding."""
        return sum(run.length for run in self.runs(start, stop) if run.first is not None)


def padded(rows: int, parts: int) -> Arrangement | None:
    """Padded at the end, so that it can be cut into so many parts; None where it can be cut as it is."""
    missing = -rows % parts
    return Arrangement.of(rows, iter([Run(0, rows, 0), Run(0, missing, None)])) if missing else None


def sectioned(sizes: Sequence[int], parts: int, copies: Sequence[int]) -> Arrangement | None:
    """Of sections one behind another: each of so many parts is a part of every section, in order; None where that is the whole.

    Of a section with copies as many parts, one behind another, have the same rows. The first of them counts.
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
    """For two axes of so many ranks that cut the rows, the outer one first, where a grid's blocks have the inner one first.

    `of`: how the rows are arranged before; None where the order of the axes makes no difference.
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
