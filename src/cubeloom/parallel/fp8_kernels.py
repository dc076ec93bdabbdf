"""The kernels of `parallel.fp8_operations`, in Triton: a matrix is read once, in tiles that are also written transposed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128  # rows and columns: runs of a line of memory in both directions, also of bytes
_WARPS = 8


def round_to_fp8(
    values: Tensor, scale: Tensor, dtype: torch.dtype, most: float, share: float, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    values = values if values.stride(1) == 1 else values.contiguous()
    m, k = values.shape
    eight = torch.empty((m, k) if rows else 0, dtype=dtype, device=values.device)
    turned = torch.empty((k, m) if columns else 0, dtype=dtype, device=values.device)
    largest = torch.zeros((), dtype=torch.float32, device=values.device)
    if values.numel():
        grid = triton.cdiv(m, _TILE), triton.cdiv(k, _TILE)
        arguments = values, scale, eight, turned, largest.view(torch.int32), m, k, values.stride(0), share, most
        _round[grid](*arguments, rows, columns, _TILE, num_warps=_WARPS)
    return eight, turned, largest


def transpose_bytes(values: Tensor) -> Tensor:
    values = values if values.stride(1) == 1 else values.contiguous()
    m, k = values.shape
    turned = torch.empty((k, m), dtype=values.dtype, device=values.device)
    if values.numel():
        grid = triton.cdiv(m, _TILE), triton.cdiv(k, _TILE)
        _transpose[grid](
            values.view(torch.uint8), turned.view(torch.uint8), m, k, values.stride(0), _TILE, num_warps=_WARPS
        )
    return turned


@triton.jit
def _round(
    values: Any,
    scale: Any,
    eight: Any,
    turned: Any,
    largest: Any,
    m: Any,
    k: Any,
    stride: Any,
    share: Any,
    most: Any,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < m)[:, None] & (column < k)[None, :]
    x = tl.load(values + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)

    # Patterns of bits of positive numbers are ordered as the numbers are, and those of NaN are beyond all of them.
    found = tl.max(tl.abs(x).to(tl.int32, bitcast=True))
    if found > tl.load(largest):
        tl.atomic_max(largest, found)

    x = tl.clamp(x * tl.load(scale) * share, -most, most, propagate_nan=tl.PropagateNan.ALL)
    y = x.to(eight.dtype.element_ty)
    if ROWS:
        tl.store(eight + row[:, None] * k + column[None, :], y, mask=inside)
    if COLUMNS:
        beside = (column < k)[:, None] & (row < m)[None, :]
        tl.store(turned + column[:, None] * m + row[None, :], tl.trans(y), mask=beside)


@triton.jit
def _transpose(values: Any, turned: Any, m: Any, k: Any, stride: Any, TILE: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < m)[:, None] & (column < k)[None, :]
    x = tl.load(values + row[:, None] * stride + column[None, :], mask=inside, other=0)
    beside = (column < k)[:, None] & (row < m)[None, :]
    tl.store(turned + column[:, None] * m + row[None, :], tl.trans(x), mask=beside)
