"""The cut layers of a foreign model: the cube's linear, between whole features or between cut ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.comm import Axis
from cubeloom.cube.linear import CubeLinear
from cubeloom.cube.products import Product
from cubeloom.cube.state import CubeState
from cubeloom.cube.weight import Weight
from cubeloom.foreign.placed import Placed


class ForeignLinear(CubeLinear):
    """`[…, K]` whole, or `[…, K/side]` inside a chain -> `[…, N/other]` inside a chain, or `[…, N]` whole.

    All ranks of x and y have the same rows. For a convolution features are dimension 1.
    """

    def __init__(
        self, layer: Placed, state: CubeState, weight: Weight, bias: nn.Parameter | None, product: Product
    ) -> None:
        super().__init__(layer.form, state, weight, bias, product)
        along_k, along_n = (state.network.axis(axis) for axis in (layer.form.k_axis, layer.form.n_axis))
        self._enters = along_k if layer.enters and along_k.size > 1 else None
        self._leaves = along_n if layer.leaves and along_n.size > 1 else None
        self._dim = layer.dim

    def forward(self, x: Tensor) -> Tensor:
        if self._enters is not None:
            x = _OwnFeatures.apply(x, self._enters, self._dim, f"{self._name} enter")
        y = super().forward(x)
        return y if self._leaves is None else _AllFeatures.apply(y, self._leaves, self._dim, f"{self._name} leave")


class FirstWeight(Weight):
    """Of a layer whose input wants no gradient: the backward does not need the weight, and nobody gathers it ahead."""

    def forward(self, backward_needs_it: bool) -> Tensor:
        return super().forward(backward_needs_it=False)

    def backward(self) -> Tensor:
        """For an input that wants a gradient all the same."""
        return self._gathered("backward") if self.sharded else super().backward()


class _OwnFeatures(torch.autograd.Function):
    """Of features that all ranks of an axis have, this rank's; their gradients come from each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, origin: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.origin = axis, dim, origin
        return _own(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_gather(gradient, ctx.dim, f"{ctx.origin} backward").wait(), None, None, None


class _AllFeatures(torch.autograd.Function):
    """The features of all ranks, on which all go on to compute the same: each has the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, origin: str) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim, f"{origin} forward").wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _own(gradient, ctx.axis, ctx.dim), None, None, None


def _own(whole: Tensor, axis: Axis, dim: int) -> Tensor:
    """A copy: a view would keep the whole alive."""
    size = whole.shape[dim] // axis.size
    return whole.narrow(dim, axis.index * size, size).contiguous()
