"""LayerNorm and RMSNorm over features that lie on x: `[rows, H/x]`, a few numbers a row to know the whole row.

Statistics are summed in float32 at least. LayerNorm gathers each part's mean and spread and merges them exactly (Chan,
Golub and LeVeque), since E[x²] - E[x]² loses digits where the mean is large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.comm import Axis
from cubeloom.cube.forms import NormForm
from cubeloom.cube.state import CubeState


class CubeNorm(nn.Module):
    def __init__(
        self,
        form: NormForm,
        state: CubeState,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        eps: float | None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._state = state
        self._eps = eps
        self._axis = state.network.axis("x")
        self._normalise = _LayerNorm if form.centred else _RMSNorm
        self._origin = form.name

    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self._eps is None else self._eps  # None is torch's default for RMSNorm
        y = self._normalise.apply(x, self._axis, eps, self._origin)
        if self.weight is not None:
            y = y * self._state.local(self.weight)
        if self.bias is not None:
            y = y + self._state.local(self.bias)
        return y


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, eps: float, origin: str) -> Tensor:
        wide = at_least_float32(x)
        mean = wide.mean(-1, keepdim=True)
        spread = (wide - mean).square().mean(-1, keepdim=True)
        if axis.size > 1:
            parts = axis.all_gather(torch.cat([mean, spread], -1)[None], 0, f"{origin} forward").wait()
            means, spreads = parts.unbind(-1)  # [x, rows] each
            mean = means.mean(0).unsqueeze(-1)
            # Parts are equally long: the whole spread is the mean spread and the spread of the means.
            spread = spreads.mean(0).unsqueeze(-1) + (means.unsqueeze(-1) - mean).square().mean(0)
        scale = torch.rsqrt(spread + eps)
        normal = (wide - mean) * scale
        ctx.save_for_backward(normal.to(x.dtype), scale)
        ctx.axis, ctx.origin = axis, origin
        return normal.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        normal, scale = (at_least_float32(saved) for saved in ctx.saved_tensors)
        wide = at_least_float32(gradient)
        sums = torch.stack([wide.mean(-1), (wide * normal).mean(-1)], -1)
        means = ctx.axis.all_reduce(sums, f"{ctx.origin} backward").wait() / ctx.axis.size
        along, across = means[..., :1], means[..., 1:]
        return ((wide - along - normal * across) * scale).to(gradient.dtype), None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, eps: float, origin: str) -> Tensor:
        wide = at_least_float32(x)
        square = axis.all_reduce(wide.square().mean(-1, keepdim=True), f"{origin} forward").wait() / axis.size
        scale = torch.rsqrt(square + eps)
        normal = wide * scale
        ctx.save_for_backward(normal.to(x.dtype), scale)
        ctx.axis, ctx.origin = axis, origin
        return normal.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        normal, scale = (at_least_float32(saved) for saved in ctx.saved_tensors)
        wide = at_least_float32(gradient)
        across = ctx.axis.all_reduce((wide * normal).mean(-1, keepdim=True), f"{ctx.origin} backward").wait()
        return ((wide - normal * across / ctx.axis.size) * scale).to(gradient.dtype), None, None, None
