"""What ranks bring back from measuring, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cubeloom.plan.hardware.device import Dtype

Shape = tuple[int, int, int]  # m, n, k of a product


def undisturbed(seconds: Sequence[float]) -> float:
    """A quarter of the repeats were faster: less than the median, in which what else the machine does has a part."""
    return sorted(seconds)[len(seconds) // 4]


@dataclass(frozen=True)
class DeviceMeasurements:
    """Seconds of each product, by dtype and shape; bytes a second; seconds of the smallest operator."""

    what: str
    processors: int
    memory: int
    products: dict[Dtype, dict[Shape, float]]
    bandwidth: float
    launch: float
    host: float


@dataclass(frozen=True)
class Transfer:
    """`nbytes` as the closed forms count them: of the whole tensor, or of the message."""

    operation: str
    group: int
    nbytes: int
    seconds: float
