"""LayerNorm and RMSNorm of features cut over x: `[rows, H/x]`, with a few statistics per row from the other ranks.

Statistics are summed in at least float32. LayerNorm gathers each part's mean and spread and merges them exactly (Chan,
Golub and LeVeque), because E[x²] - E[x]² loses precision if the mean is large. Like a collective, a norm is two
autograd nodes, so that another strand of a weave computes while the statistics are communicated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.comm import Axis, Pending
from cubeloom.parallel import weave
from cubeloom.parallel.collective import placeholder
from cubeloom.parallel.layers.declared import Declared, Making, Seen, make_layer
from cubeloom.parallel.specs import ImageNormSpec, NormSpec, Side, TracedNormSpec
from cubeloom.parallel.state import CubeState


@dataclass(frozen=True)
class Norm(Declared):
    """A norm of features on `side`: LayerNorm and RMSNorm on x only, GroupNorm and BatchNorm on either.

    `sharded`: its rows are cut even if activations are replicated. `joined`: its features are those of a `Concat`: the
    number of the first tensor's, of the second's, and of turns. Its groups are those of the first tensor's features
    followed by the second's.
    """

    sharded: bool = False
    side: Side = "x"
    joined: tuple[int, int, int] | None = None

    def spec(self, name: str, module: nn.Module, seen: Seen) -> NormSpec | ImageNormSpec | None:
        match module:
            case nn.LayerNorm() | nn.RMSNorm() if self.side == "x":
                return NormSpec(
                    name=name,
                    features=math.prod(module.normalized_shape),
                    centred=isinstance(module, nn.LayerNorm),
                    weight=module.elementwise_affine,
                    bias=getattr(module, "bias", None) is not None,
                    always=self.sharded,
                )
            case nn.GroupNorm():
                return ImageNormSpec(
                    name=name,
                    side=self.side,
                    features=module.num_channels,
                    affine=module.affine,
                    pixels=_pixels(seen),
                    groups=module.num_groups,
                    joined=self.joined,
                )
            case nn.BatchNorm1d() | nn.BatchNorm2d() | nn.BatchNorm3d():
                return ImageNormSpec(
                    name=name,
                    side=self.side,
                    features=module.num_features,
                    affine=module.affine,
                    pixels=_pixels(seen),
                )
        return None


def _pixels(seen: Seen) -> int:
    return 1 if seen.pixels is None else seen.pixels[0]


class CubeNorm(nn.Module):
    """A norm of features cut over these axes, as are its weight and bias."""

    def __init__(
        self,
        spec: NormSpec | TracedNormSpec,
        state: CubeState,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        eps: float | None,
        axes: tuple[Side, ...] = ("x",),
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._state = state
        self._eps = eps
        self._axis = state.network.axis(*sorted(axes))
        self._offset = offset
        self._centred = spec.centred
        self._origin = spec.name

    def _local(self, parameter: nn.Parameter | None) -> Tensor | None:
        return None if parameter is None else self._state.local(parameter)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._local(self.weight), self._local(self.bias)
        if weight is not None and self._offset:
            weight = weight + self._offset
        eps = torch.finfo(x.dtype).eps if self._eps is None else self._eps  # None is torch's default for RMSNorm
        if self._axis.size == 1:
            if self._centred:
                return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
            return functional.rms_norm(x, x.shape[-1:], weight, eps)
        call = _Call(self._axis, self._centred, eps, self._origin)
        token = _Launch.apply(x, call)
        weave.pause()
        y = _Finish.apply(token, call)
        if weight is not None:
            y = y * weight
        return y if bias is None else y + bias


@make_layer.register
def _(spec: NormSpec, making: Making) -> nn.Module:
    assert isinstance(making.plain, nn.LayerNorm | nn.RMSNorm)
    return CubeNorm(spec, making.state, making.parameter("weight"), making.parameter("bias"), making.plain.eps)


def at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass
class _Call:
    """One use of a norm: what its two nodes pass to each other, in the forward and, in reverse, in the backward."""

    axis: Axis
    centred: bool  # LayerNorm; otherwise RMSNorm
    eps: float
    origin: str
    pending: Pending | None = None
    held: tuple[Tensor, ...] = ()

    def take(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The pending collective, and the saved tensors."""
        assert self.pending is not None
        pending, held, self.pending, self.held = self.pending, self.held, None, ()
        return pending.wait(), held


class _Launch(torch.autograd.Function):
    """Forward: starts the reduction of the statistics. Backward: the input gradient, from the reduced sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        wide = at_least_float32(x)
        ctx.call = call
        call.held = (wide.detach(),)
        origin = f"{call.origin} forward"
        if call.centred:
            mean = wide.mean(-1, keepdim=True)
            spread = (wide - mean).square().mean(-1, keepdim=True)
            call.pending = call.axis.all_gather(torch.cat([mean, spread], -1)[None], 0, origin)
        else:
            call.pending = call.axis.all_reduce(wide.square().mean(-1, keepdim=True), origin)
        return placeholder(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        call: _Call = ctx.call
        sums, (wide, normal, scale) = call.take()
        means = sums / call.axis.size
        slope = wide - normal * means[..., -1:]
        if call.centred:
            slope = slope - means[..., :1]
        return (slope * scale).to(gradient.dtype), None


class _Finish(torch.autograd.Function):
    """Forward: normalises with the statistics of the whole row. Backward: starts the reduction that the gradient needs."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, call: _Call) -> Tensor:
        joined, (wide,) = call.take()
        if call.centred:
            means, spreads = joined.unbind(-1)  # [x, rows] each
            mean = means.mean(0).unsqueeze(-1)
            # Parts have equal length: the whole spread is the mean of the spreads plus the spread of the means.
            spread = spreads.mean(0).unsqueeze(-1) + (means.unsqueeze(-1) - mean).square().mean(0)
            scale = torch.rsqrt(spread + call.eps)
            normal = (wide - mean) * scale
        else:
            scale = torch.rsqrt(joined / call.axis.size + call.eps)
            normal = wide * scale
        ctx.save_for_backward(normal.to(token.dtype), scale)
        ctx.call = call
        return normal.to(token.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        call: _Call = ctx.call
        normal, scale = (at_least_float32(saved) for saved in ctx.saved_tensors)
        wide = at_least_float32(gradient)
        sums = [(wide * normal).mean(-1)]
        if call.centred:
            sums.insert(0, wide.mean(-1))
        call.pending = call.axis.all_reduce(torch.stack(sums, -1), f"{call.origin} backward")
        call.held = (wide, normal, scale)
        return placeholder(gradient), None
