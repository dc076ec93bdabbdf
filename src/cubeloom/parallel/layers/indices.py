"""Indices into a cut vocabulary. Each rank looks up its own part, so an index out of range would go unnoticed."""

from __future__ import annotations

from torch import Tensor

from cubeloom.comm import devices


def check_indices(indices: Tensor, entries: int, what: str, ignored: int | None = None) -> None:
    """Raise IndexError, as torch does for a whole vocabulary, if an index is neither below `entries` nor `ignored`.

    On a GPU the device asserts it, as torch's kernels do, so that the host does not wait.
    """
    legal = (indices >= 0) & (indices < entries)
    besides = ""
    if ignored is not None:
        legal |= indices == ignored
        besides = f", or {ignored} for one that is ignored"
    range_ = f"out of range: it must be from 0 to {entries - 1}{besides}"
    if not devices.assert_all(legal, f"{what} is {range_}"):
        raise IndexError(f"{what} {indices[~legal][0].item()} is {range_}")
