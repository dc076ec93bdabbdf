"""FP8 matrices: rounded, transposed and measured in one pass over memory on a GPU; and multiplied.

FP8 matmuls want the inner dimension contiguous in both operands. The three products of a linear sum over features, over
outputs and over tokens, so each operand is multiplied as it is in one product and transposed in another.

All are operations that the compiler leaves as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cubeloom.base import torch_private
from cubeloom.comm import devices
from cubeloom.parallel.products import add_product

INPUT, WEIGHT, GRADIENT = range(3)
DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)  # by operand
_ALIGNED = 16  # sizes that FP8 matmuls of GPUs take are multiples of this


@torch.library.custom_op("cubeloom::round_to_fp8", mutates_args=())
def round_to_fp8(
    values: Tensor, scale: Tensor, operand: int, share: float, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix `values · share · scale` in eight bits, the same transposed, and the largest absolute value in float32.

    `rows`, `columns`: which of the first two are wanted; the other one is empty. Values beyond the largest number become
    that number. The largest value is that before scaling, and NaN if there is one.
    """
    dtype = DTYPES[operand]
    most = torch.finfo(dtype).max
    kernels = _kernels(values)
    if kernels is not None:
        found: tuple[Tensor, Tensor, Tensor] = kernels.round_to_fp8(values, scale, dtype, most, share, rows, columns)
        return found
    wide = values.to(torch.promote_types(values.dtype, torch.float32)) * scale
    if share != 1:
        wide = wide * share
    eight = wide.clamp_(-most, most).to(dtype)
    nothing = eight.new_empty(0)
    turned = _turned(eight) if columns else nothing.clone()
    return eight if rows else nothing, turned, largest(values)


@round_to_fp8.register_fake
def _(
    values: Tensor, scale: Tensor, operand: int, share: float, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    m, k = values.shape
    shapes = (m, k) if rows else (0,), (k, m) if columns else (0,)
    eight, turned = (values.new_empty(shape, dtype=DTYPES[operand]) for shape in shapes)
    return eight, turned, values.new_empty((), dtype=torch.float32)


def largest(values: Tensor) -> Tensor:
    """The largest absolute value in float32; NaN if there is one, and 0 of nothing."""
    if not values.numel():
        return values.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(values.detach(), torch.inf).float()


# One operation, so that a rehearsal counts no temporary memory.
@torch.library.custom_op("cubeloom::transpose_bytes", mutates_args=())
def transposed(values: Tensor) -> Tensor:
    """A matrix of bytes, transposed and contiguous."""
    kernels = _kernels(values)
    return _turned(values) if kernels is None else kernels.transpose_bytes(values)


@transposed.register_fake
def _(values: Tensor) -> Tensor:
    m, k = values.shape
    return values.new_empty(k, m)


@torch.library.custom_op("cubeloom::fp8_product", mutates_args=())
def fp8_product(
    left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """`left · rightᵀ` of FP8 matrices in this dtype, each times its factor. `fast`: it may be summed with fewer bits.

    Where the device has no such matmul, or not for these sizes, the same rounded operands are multiplied in `dtype`.
    """
    aligned = all(size % _ALIGNED == 0 for size in (*left.shape, *right.shape))
    if aligned and dtype.itemsize <= 4 and devices.multiplies_fp8(left.device):
        return torch_private.scaled_product(left, right, (of_left, of_right), dtype, fast)
    return add_product(None, left.to(dtype) * of_left.to(dtype), (right.to(dtype) * of_right.to(dtype)).t(), dtype)


@fp8_product.register_fake
def _(left: Tensor, right: Tensor, of_left: Tensor, of_right: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    return left.new_empty(len(left), len(right), dtype=dtype)


def _turned(values: Tensor) -> Tensor:
    return values.t().clone(memory_format=torch.contiguous_format)


def _kernels(values: Tensor) -> Any:
    """Those of GPUs, if the values are on one that has them.

    Of float32 they are wrong: compiled by Triton 3.6 for an H200, they gave other bytes than the same in bfloat16.
    """
    if not values.is_cuda or values.dtype.itemsize > 2:
        return None
    try:
        from cubeloom.parallel import fp8_kernels
    except ImportError:  # torch for other GPUs may come without triton
        return None
    return fp8_kernels
