"""Packs whole documents into samples. Only a document longer than a sample continues in the next one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cubeloom.train.data.checked import Checked
from cubeloom.train.data.tokenizer import Array

_AT_ONCE = 1 << 14  # samples whose marks are in memory at once


@dataclass(frozen=True)
class Packs:
    """Sample n is the tokens from `starts[n]` until `stops[n]`: as many whole documents as fit, in order.

    A document longer than a sample is cut. Each part starts with the last token of the one before, and the next
    documents are packed after the last part.
    """

    starts: Array
    stops: Array
    ends: Array
    """The ends of all documents."""

    @classmethod
    def of(cls, ends: Array, sequence: int) -> Packs:
        """`ends`: the position after each document's end token. Samples have `sequence` tokens and the one that
        follows.
        """
        starts, stops = [], []
        start, last = 0, int(ends[-1]) if len(ends) else 0
        while start < last:
            fit = int(np.searchsorted(ends, start + sequence + 1, side="right"))
            whole = int(ends[fit - 1]) if fit else 0
            cut = whole <= start
            starts.append(start)
            stops.append(start + sequence + 1 if cut else whole)
            start = start + sequence if cut else whole
        return cls(np.array(starts, np.int64), np.array(stops, np.int64), ends)

    def __len__(self) -> int:
        return len(self.starts)

    def bounds(self, number: int) -> slice:
        return slice(int(self.starts[number]), int(self.stops[number]))

    def __getitem__(self, where: slice) -> Array:
        """For each of these tokens the number of its document, from 0."""
        found = np.searchsorted(self.ends, np.arange(where.start, where.stop), side="right")
        return found - found[0]


def with_targets(starts: Array, stops: Array, counted: Array | Checked, ends: Array | None) -> Array:
    """The samples with a target that counts. With `ends` of documents, their first tokens are not targets.

    Sample n is the tokens from `starts[n]` until `stops[n]`, and its first token is not a target.
    """
    found = [
        _with_targets(starts[at : at + _AT_ONCE], stops[at : at + _AT_ONCE], counted, ends)
        for at in range(0, len(starts), _AT_ONCE)
    ]
    return np.flatnonzero(np.concatenate(found))


def _with_targets(starts: Array, stops: Array, counted: Array | Checked, ends: Array | None) -> Array:
    begin, end = int(starts[0]), int(stops[-1])
    marks = np.append(counted[begin:end] != 0, False)
    if ends is not None:
        first, last = np.searchsorted(ends, (begin, end))
        marks[ends[first:last] - begin] = False
    bounds = np.stack([np.minimum(starts + 1, stops), stops], 1).ravel() - begin
    return np.logical_or.reduceat(marks, bounds)[::2] & (stops > starts + 1)
