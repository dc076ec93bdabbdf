"""Between a tensor replicated over an axis and its parts, where all ranks of the axis then compute the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cubeloom.comm import Axis


def own_part_of(whole: Tensor, axis: Axis, dim: int, origin: str) -> Tensor:
    """This rank's part, without communication. The backward all-gathers the gradients of the parts."""
    return whole if axis.size == 1 else _OwnPart.apply(whole, axis, dim, origin)


def all_parts_of(part: Tensor, axis: Axis, dim: int, origin: str) -> Tensor:
    """The parts of all ranks, all-gathered. In the backward each rank takes its part: all have the same gradient."""
    return part if axis.size == 1 else _AllParts.apply(part, axis, dim, origin)


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis, dim: int, origin: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.origin = axis, dim, origin
        return _own(whole, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_gather(gradient, ctx.dim, f"{ctx.origin} backward").wait(), None, None, None


class _AllParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Axis, dim: int, origin: str) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(part, dim, f"{origin} forward").wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _own(gradient, ctx.axis, ctx.dim), None, None, None


def _own(whole: Tensor, axis: Axis, dim: int) -> Tensor:
    """A copy, because a view would keep the whole tensor alive."""
    size = whole.shape[dim] // axis.size
    return whole.narrow(dim, axis.index * size, size).contiguous()
