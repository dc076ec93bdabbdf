"""Time of operators on one device."""

from __future__ import annotations

import numpy as np

from cubeloom.plan.costs.quantity import Quantity
from cubeloom.plan.hardware.device import SIZES, Device, Dtype

# Libraries take smaller tiles where large ones would leave processors idle; each processor then computes a little slower,
# as it loads more for what it multiplies. (share of the rows, share of the columns, speed)
_TILES = ((1.0, 1.0, 1.0), (1.0, 0.5, 0.93), (0.5, 0.5, 0.8), (0.5, 0.25, 0.6))


def matmul(
    device: Device,
    m: Quantity,
    n: Quantity,
    k: Quantity,
    dtype: Dtype = "bf16",
    count: Quantity = 1,
    processors: Quantity | None = None,
) -> Quantity:
    """Seconds of `count` products `[m,k] · [k,n]` in one launch.

    The output is cut into tiles, and as many tiles as there are processors make a wave: a product takes whole waves of
    whole tiles, or the time to read and write its matrices if that is longer. `processors`: fewer than all of them, where
    a collective holds the others.
    """
    held = device.processors if processors is None else processors
    speed = device.peak(dtype) * device.matmul_fraction / device.processors  # FLOP/s of one processor
    best: Quantity = float("inf")
    for rows, columns, fraction in _TILES:
        tall, wide = max(1.0, device.tile_rows * rows), max(1.0, device.tile_columns * columns)
        tiles = np.ceil(np.divide(m, tall)) * np.ceil(np.divide(n, wide)) * count
        waves = np.ceil(tiles / held)
        best = np.minimum(best, waves * (2 * tall * wide * k / (speed * fraction)))
    moved = SIZES[dtype] * count * (m * k + k * n + m * n)
    return np.maximum(best, moved / (device.bandwidth * device.bandwidth_fraction)) + device.launch


def memory_bound(device: Device, nbytes: Quantity) -> Quantity:
    """Seconds of an operator that reads and writes so many bytes in all, and computes little."""
    return nbytes / (device.bandwidth * device.bandwidth_fraction) + device.launch


def issued(device: Device, seconds: Quantity, operators: Quantity) -> Quantity:
    """Device and host work side by side: what lasts longer, the device's work or the host's issuing of it."""
    return np.maximum(seconds, operators * device.host)
