"""What one device computes and holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cubeloom.base.errors import UserError
from cubeloom.plan.hardware.facts import Fact, number

Dtype = Literal["bf16", "fp16", "fp32", "fp8"]
SIZES: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}  # bytes


@dataclass(frozen=True, kw_only=True)
class Device:
    """Rates in FLOP/s and bytes/s, times in seconds."""

    name: str
    about: str
    kind: str | None = None  # `device` of a job that runs on it; files of older calibrations do not say
    bf16: float = number(1)  # peak of dense products
    fp16: float = number(1)
    fp32: float = number(1)
    matmul_fraction: float = number()  # of the peak, in a large product that fills every wave
    processors: int = number(1)  # that each compute a tile at a time: SMs, compute units, cores
    tile_rows: int = number(1)
    tile_columns: int = number(1)
    memory: float = number(1)
    bandwidth: float = number(1)
    bandwidth_fraction: float = number()  # of the bandwidth, in a large operator that only reads and writes
    launch: float = number()  # the least that an operator takes on the device
    host: float = number()  # what the host needs to issue an operator
    fp8: float = number(default=0.0)  # peak of dense products; 0: there are none
    fp8_fraction: float = number(default=0.0)  # of that peak, in a large product
    attention_forward: float = number(default=0.45)  # of the peak, in fused attention of long sequences, heads of 128
    attention_backward: float = number(default=0.4)
    flash2: float = number(default=1.0)  # what the second flash attention reaches of that
    update_fraction: float = number(default=0.0)  # of the bandwidth, in an optimizer's step; 0: as other operators
    facts: Mapping[str, Fact] = field(default_factory=dict, compare=False, repr=False)

    def peak(self, dtype: Dtype) -> float:
        if dtype not in SIZES or (dtype == "fp8" and not self.fp8):
            raise UserError(
                f"no peak for dtype {dtype!r}; there are {', '.join(name for name in SIZES if getattr(self, name))}"
            )
        return float(getattr(self, dtype))

    def fraction(self, dtype: Dtype) -> float:
        """Of the peak, in a large product that fills every wave."""
        return self.fp8_fraction if dtype == "fp8" else self.matmul_fraction
