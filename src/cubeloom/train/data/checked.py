"""Memory-mapped numbers whose parts are compared with checksums when they are read.

Training thus never sees a damaged token, and need not read a terabyte before it starts. A sample of 4,096 tokens took
80 us, and 30 us without the check (one core of a Xeon, 2026-11-18).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cubeloom.base.errors import UserError
from cubeloom.train.data.tokenizer import Array

PART = 1 << 15
"""Bytes per checksum, a CRC-32."""
SUMS = np.dtype("<u4")


def sums(file: Path) -> Array:
    """The checksums of a file's parts."""
    return np.array(list(_sums(file)), SUMS)


def _sums(file: Path) -> Iterator[int]:
    with file.open("rb") as opened:
        while part := opened.read(PART):
            yield zlib.crc32(part)


def parts(size: int) -> int:
    """The number of parts of a file of this size."""
    return -(-size // PART)


class Checked:
    """The numbers from `first` to `last`, as an array: `[a:b]` reads, and raises UserError if the file is damaged."""

    def __init__(self, file: Path, dtype: np.dtype[Any], expected: Array) -> None:
        self._file = file
        self._dtype = dtype
        self._bytes = np.memmap(file, np.uint8, mode="r") if file.stat().st_size else np.zeros(0, np.uint8)
        self._expected = expected
        self.first, self.last = 0, len(self._bytes) // dtype.itemsize

    def within(self, first: int, last: int) -> Checked:
        """A part of it, without reading."""
        part = Checked(self._file, self._dtype, self._expected)
        part.first, part.last = self.first + first, self.first + last
        return part

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, where: slice) -> Array:
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise ValueError("only runs of numbers can be read")
        begin, end = ((self.first + place) * self._dtype.itemsize for place in (start, max(start, stop)))
        for part in range(begin // PART, parts(end)):
            self._check(part)
        return np.asarray(self._bytes[begin:end]).view(self._dtype)

    def _check(self, part: int) -> None:
        begin = part * PART
        if zlib.crc32(self._bytes[begin : begin + PART].data) != self._expected[part]:
            raise UserError(
                f"{self._file} is damaged: between bytes {begin:,} and {begin + PART:,} it is not what was written; "
                f"`cubeloom data show {self._file.parent}` checks all its files"
            )
