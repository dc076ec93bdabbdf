"""Random numbers by position: a number depends on a key and an index, and not on who draws it or in what order.

A rank therefore draws exactly its shard of a parameter, or of a dropout mask, and any two grids agree bit for bit.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

# The golden-ratio step and the two multipliers of the SplitMix64 generator, as signed 64-bit numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)

# Normal numbers are drawn in blocks of whole vectors. On a CPU log and cos may differ in the last bit between the
# vectorised body of a loop and its remainder, so no element may be in a remainder, and a block must not be split among
# threads. A GPU computes every element in the same way, and works best on many at once.
_VECTOR = 256
_CPU_BLOCK = 1 << 15
_GPU_BLOCK = 1 << 22
_CPU = torch.device("cpu")


def key(*parts: object) -> int:
    """A 64-bit key from any parts that print distinctly, for instance a seed and a parameter's name."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits for each int64 index (SplitMix64's finaliser on key + index · step; int64 wraps around)."""
    state = index * _STEP + key
    state = (state ^ _shift(state, 30)) * _FIRST
    state = (state ^ _shift(state, 27)) * _SECOND
    return state ^ _shift(state, 31)


def _shift(state: Tensor, places: int) -> Tensor:
    """A logical shift to the right; torch's is arithmetic."""
    return (state >> places) & ((1 << (64 - places)) - 1)


def uniform(key: int, index: Tensor) -> Tensor:
    """float64 in [0, 1), 53 bits each."""
    return _shift(bits(key, index), 11).to(torch.float64) * 2.0**-53


def rounded(values: Tensor, random: Tensor) -> Tensor:
    """bfloat16, rounded up or down at random such that the mean is the value, by the low 16 of these random bits.

    bfloat16 is the upper half of float32: a random lower half is added, and cut off.
    """
    wide = values.float()
    carried = wide.view(torch.int32) + (random & 0xFFFF).to(torch.int32)
    found = (carried & -0x10000).view(torch.float32)
    return torch.where(wide.isfinite(), found, wide).to(torch.bfloat16)  # a carry could turn NaN into a number


def global_index(
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    local: tuple[int, ...],
    start: int,
    count: int,
    device: torch.device = _CPU,
) -> Tensor:
    """The indices of elements start..start+count of a local block in the flattened whole of this shape."""
    flat = torch.arange(start, start + count, device=device)
    index = torch.zeros_like(flat)
    stride = 1
    for dim in reversed(range(len(shape))):
        index += (flat % local[dim] + offset[dim]) * stride
        flat = flat // local[dim]
        stride *= shape[dim]
    return index


def normal(
    key: int,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    local: tuple[int, ...],
    device: torch.device = _CPU,
) -> Tensor:
    """A block of a tensor of standard normal numbers (float64, Box-Muller), without the rest of the tensor.

    Devices of one kind draw the same bits; other kinds may differ in the last ones.
    """
    count = math.prod(local)
    padded = -(-count // _VECTOR) * _VECTOR  # the last block is longer; its surplus is cut off
    out = torch.empty(padded, dtype=torch.float64, device=device)
    block = _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK
    for start in range(0, padded, block):
        index = global_index(shape, offset, local, start, min(block, padded - start), device)
        radius = torch.sqrt(-2 * torch.log1p(-uniform(key, 2 * index)))
        out[start : start + block] = radius * torch.cos(2 * math.pi * uniform(key, 2 * index + 1))
    return out[:count].view(local)
