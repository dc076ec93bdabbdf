"""What ranks bring back from measuring, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cubeloom.plan.hardware.device import Dtype

Shape = tuple[int, int, int]  # m, n, k of a product
Heads = tuple[int, int, int]  # length, heads, features of a head


def undisturbed(seconds: Sequence[float]) -> float:
    """A quarter of the repeats were faster: less than the median, in which what else the machine does has a part."""
    return sorted(seconds)[len(seconds) // 4]


@dataclass(frozen=True, kw_only=True)
class DeviceMeasurements:
    """Seconds, by what was computed."""

    what: str
    processors: int
    memory: int
    products: dict[Dtype, dict[Shape, float]]
    attention: dict[Heads, tuple[float, float]]  # forward and backward, causal
    attention_dtype: Dtype
    operators: dict[int, float]  # by the bytes that one reads and writes
    update: tuple[int, float]  # parameters of float32, and a step of AdamW
    launch: float
    host: float


@dataclass(frozen=True)
class Transfer:
    """`nbytes` as the closed forms count them: of the whole tensor, or of the message."""

    operation: str
    group: int
    nbytes: int
    seconds: float
    rank_stride: int = 1  # between neighbours; all such groups of the job communicate at once


@dataclass(frozen=True)
class RankMeasurements:
    device: DeviceMeasurements
    transfers: list[Transfer]
    drags: dict[tuple[int, int], float]  # by group and stride: the share of computation that a transfer takes
