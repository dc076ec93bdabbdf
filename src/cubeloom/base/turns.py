"""Interleaves the features of two tensors, so that an equal contiguous part of the result has equal parts of both."""

from __future__ import annotations

import torch
from torch import Tensor


def interleave(first: Tensor, second: Tensor, turns: int) -> Tensor:
    """`[samples, A, …]`, `[samples, B, …]` -> `[samples, A + B, …]`: A/turns of the first, B/turns of the second, and so on."""
    pairs = zip(first.chunk(turns, 1), second.chunk(turns, 1), strict=True)
    return torch.cat([part for pair in pairs for part in pair], 1)


def order(first: int, second: int, turns: int) -> list[int]:
    """For each position among the interleaved features, its position if the second's came after all of the first's."""
    a, b = first // turns, second // turns
    return [
        place
        for turn in range(turns)
        for place in (*range(turn * a, (turn + 1) * a), *range(first + turn * b, first + (turn + 1) * b))
    ]
