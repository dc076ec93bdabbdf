"""Time of operators on one device."""

from __future__ import annotations

import numpy as np

from cubeloom.plan.costs.quantity import Quantity
from cubeloom.plan.hardware.device import SIZES, Device, Dtype
from cubeloom.plan.hardware.software import Attention

# Libraries take smaller tiles where large ones would leave processors idle; each processor then computes a little slower,
# as it loads more for what it multiplies. (share of the rows, share of the columns, speed)
_TILES = ((1.0, 1.0, 1.0), (0.5, 1.0, 0.93), (1.0, 0.5, 0.93), (0.5, 0.5, 0.8), (0.5, 0.25, 0.6))

_ALIGNED = 16  # bytes: rows of a matrix that begin elsewhere are loaded in pieces
_UNALIGNED = 0.35  # of the speed

_HALF_LENGTH = 512  # tokens of fused attention that take twice as long as at the rate of long sequences
_NARROW = {"flash": 0.85, "flash2": 0.85, "best": 0.7}  # of the rate with heads of 128, with heads of 64
_FIRST_FLASH = 0.6  # of the second's rate


def matmul(
    device: Device,
    m: Quantity,
    n: Quantity,
    k: Quantity,
    dtype: Dtype = "bf16",
    count: Quantity = 1,
) -> Quantity:
    """Seconds of `count` products `[m,k] · [k,n]` in one launch.

    The output is cut into tiles, and as many tiles as there are processors make a wave: a product takes whole waves of
    whole tiles, or the time to read and write its matrices if that is longer.
    """
    speed = device.peak(dtype) * device.fraction(dtype) / device.processors  # FLOP/s of one processor
    best: Quantity = float("inf")
    for rows, columns, fraction in _TILES:
        tall, wide = max(1.0, device.tile_rows * rows), max(1.0, device.tile_columns * columns)
        tiles = np.ceil(np.divide(m, tall)) * np.ceil(np.divide(n, wide)) * count
        waves = np.ceil(tiles / device.processors)
        best = np.minimum(best, waves * (2 * tall * wide * k / (speed * fraction)))
    aligned = (np.mod(SIZES[dtype] * k, _ALIGNED) == 0) & (np.mod(SIZES[dtype] * n, _ALIGNED) == 0)
    best = best / np.where(aligned, 1.0, _UNALIGNED)
    moved = SIZES[dtype] * count * (m * k + k * n + m * n)
    return np.maximum(best, moved / (device.bandwidth * device.bandwidth_fraction)) + device.launch


def fused_attention(
    device: Device,
    length: Quantity,
    head_dim: int,
    sequences: Quantity,
    causal: bool,
    dtype: Dtype = "bf16",
    kernel: Attention = "best",
) -> tuple[Quantity, Quantity]:
    """Seconds of forward and backward of so many sequences of one head each.

    Two products of [length, head] and [head, length] forward, five backward; half of each where it is causal. Heads are
    padded to a multiple of 32 features. Short sequences have fewer blocks to work on, and more of them on the diagonal.
    """
    padded = 32 * np.ceil(head_dim / 32)
    flops = 2 * length * length * padded * sequences * (0.5 if causal else 1.0)
    narrow = _NARROW[kernel] if padded <= 64 else 1.0
    rate = device.peak(dtype) * narrow * length / (length + _HALF_LENGTH)
    if kernel != "best":
        rate = rate * device.flash2 * (_FIRST_FLASH if kernel == "flash" else 1.0)
    return 2 * flops / (rate * device.attention_forward), 5 * flops / (rate * device.attention_backward)


def memory_bound(device: Device, nbytes: Quantity) -> Quantity:
    """Seconds of an operator that reads and writes so many bytes in all, and computes little."""
    return nbytes / (device.bandwidth * device.bandwidth_fraction) + device.launch
