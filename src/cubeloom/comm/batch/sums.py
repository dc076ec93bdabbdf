"""From a rank's samples to values of the whole batch and back, with gradients.

The gradients that ranks compute for parameters of the model are averaged over ranks. The gradient of a rank's samples is
therefore multiplied by the number of ranks. A tensor that is the same on all ranks gets the average of their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cubeloom.comm.axis import Axis


class Sum(torch.autograd.Function):
    """From the sums of ranks to the sum over the whole batch, on every rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, origin: str) -> Tensor:
        ctx.ranks = axis.size
        return axis.all_reduce(own, origin).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.ranks, None, None


class Average(torch.autograd.Function):
    """The mean of the ranks' means, which are of equal numbers of samples."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, origin: str) -> Tensor:
        return axis.all_reduce(own / axis.size, origin).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class Mean(torch.autograd.Function):
    """Sum of sums over sum of counts: the mean of the whole batch. The backward is that of the rank's own part.

    `ranks`: ranks of data and z, over which gradients are averaged. A rank's share is therefore multiplied by their
    number. If no target counts, the result is that of torch: the mean is NaN and its gradient 0.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, everybody: Axis, ranks: int, origin: str) -> Tensor:
        sums = everybody.all_reduce(torch.stack([total, count]), f"{origin} mean").wait()
        ctx.count, ctx.ranks = sums[1], ranks
        return sums[0] / sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return (gradient * (ctx.ranks / ctx.count)).masked_fill(ctx.count == 0, 0), None, None, None, None


class Gathered(torch.autograd.Function):
    """The samples of all ranks, on every rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, dim: int, origin: str) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        # Not every backend takes booleans.
        sent = (own.byte() if own.dtype is torch.bool else own).to(axis.device)
        return axis.all_gather(sent, dim, origin).wait().to(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return own_part(gradient, ctx.axis, ctx.dim) * ctx.axis.size, None, None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return own_part(whole, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole = ctx.axis.all_gather(gradient, ctx.dim, "samples backward").wait()
        return whole / ctx.axis.size, None, None


class _UsedByEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(gradient / ctx.axis.size, "used with samples backward").wait(), None


def own_part(whole: Tensor, axis: Axis, dim: int) -> Tensor:
    size = whole.shape[dim] // axis.size
    return whole.narrow(dim, axis.index * size, size)


def own_samples(whole: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's samples of a tensor that is the same on all ranks."""
    follows = whole.requires_grad and torch.is_grad_enabled()
    found: Tensor = _OwnPart.apply(whole, axis, dim) if follows else own_part(whole, axis, dim)
    return found


def used_by_each(whole: Tensor, axis: Axis) -> Tensor:
    """A tensor that is the same on all ranks, which each rank combines with its own samples."""
    follows = whole.requires_grad and torch.is_grad_enabled()
    found: Tensor = _UsedByEach.apply(whole, axis) if follows else whole
    return found
