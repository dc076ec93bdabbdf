"""FP8: operands of linears rounded to eight bits before they are gathered and multiplied.

Inputs and weights are rounded to E4M3 and output gradients to E5M2, each operand with one scale. The scale follows from
the largest absolute values (amax) that the operand had in the last steps, over all ranks, micro-batches and strands
(delayed scaling), so it does not depend on the grid. It is a power of two: it decides which values are too large or too
small, and never how the others are rounded. The first step has no history: it multiplies in the model's dtype, and only
measures.

A rank's output gradients are those of the mean over its own samples. The scale is that of the mean over all samples,
as in the serial model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.comm import Network, devices
from cubeloom.parallel.collective import Payload
from cubeloom.parallel.config import ShardingPolicy
from cubeloom.parallel.deferred_wgrad import DeferredWgradLinear, handing_out, seen_by
from cubeloom.parallel.gradients import Gradients
from cubeloom.parallel.parameter import Version, local_of, version_of
from cubeloom.parallel.products import Matmul, add_product, add_to
from cubeloom.parallel.specs import LayerSpec, fp8_layers
from cubeloom.parallel.weight import Weight

AMAX = "largest operands"  # the history in a checkpoint
STEPS = 16  # of which the largest values are remembered
INPUT, WEIGHT, GRADIENT = range(3)
DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
OPERANDS = ("input", "weight", "gradient")
_ALIGNED = 16  # sizes that FP8 matmuls of GPUs take are multiples of this


class AmaxHistory:
    """The largest absolute values of the operands of a model's FP8 layers: the same on all ranks."""

    def __init__(self, layers: Sequence[str], network: Network) -> None:
        grid = network.grid
        self.samples_parts = grid.data * grid.z
        self.scales: Tensor | None = None  # [layers, operands]; None before the first step has ended
        self.version = 0  # of the scales
        self._places = {name: place for place, name in enumerate(layers)}
        self._axis = network.across(tuple(range(grid.pipe)), "data", "z", "y", "x")
        self._now = torch.zeros(len(layers), len(OPERANDS), device=network.device)
        self._steps = self._now.new_zeros(0, *self._now.shape)

    def measure(self, layer: str, operand: int, values: Tensor) -> None:
        if values.numel():
            slot = self._now[self._places[layer], operand]
            found = torch.linalg.vector_norm(values.detach(), torch.inf)
            slot.copy_(torch.maximum(slot, found.to(slot.dtype)))

    def end_step(self) -> None:
        """All gradients of a step are final: agree with the other ranks, and choose the scales of the next step."""
        now, self._now = self._now, torch.zeros_like(self._now)
        now = self._axis.all_reduce_in_place(now, "largest operands", largest=True).wait()
        now[:, GRADIENT] /= self.samples_parts
        # A step that overflowed is skipped, and says nothing about the next.
        self._remember(torch.where(now.isfinite(), now, 0)[None])

    def _remember(self, steps: Tensor) -> None:
        self._steps = torch.cat([self._steps, steps])[-STEPS:]
        self.version += 1
        self.scales = scales_of(self._steps.amax(0))

    def scale(self, layer: str, operand: int) -> Tensor | None:
        return None if self.scales is None else self.scales_of(layer)[operand]

    def scales_of(self, layer: str) -> Tensor:
        assert self.scales is not None
        return self.scales[self._places[layer]]

    def state(self) -> dict[str, list[list[float]]]:
        """For a checkpoint: by layer, the values of each operand in the last steps."""
        found = self._steps.permute(1, 2, 0).tolist()
        return {name: found[place] for name, place in self._places.items()} if len(self._steps) else {}

    def load(self, state: Mapping[str, list[list[float]]]) -> None:
        """Take up the state of the same model on any grid. Layers without one have never been measured."""
        if not state:
            return
        steps = max(len(each[0]) for each in state.values())
        nothing = [[0.0] * steps] * len(OPERANDS)
        found = torch.tensor([state.get(name, nothing) for name in self._places], dtype=self._now.dtype)
        self._steps = self._steps[:0]
        self._remember(found.permute(2, 0, 1).to(self._now.device))


def amax_history(
    specs: Iterable[LayerSpec], network: Network, rest: ShardingPolicy, gradients: Gradients
) -> AmaxHistory | None:
    """Of all layers of a model, created by all ranks together; None if nothing is rounded."""
    if rest.precision != "fp8":
        return None
    history = AmaxHistory(fp8_layers(specs), network)
    gradients.when_reduced = history.end_step
    return history


def scales_of(amax: Tensor) -> Tensor:
    """The largest powers of two with which these values, [layers, operands] in float32, stay within their dtypes; 1 for 0.

    The largest numbers of both dtypes are 1.75 · 2^n. Exponents are computed in integers, so that powers are exact.
    """
    bits = amax.view(torch.int32)
    exponent, above = (bits >> 23) - 127, ((bits & 0x7FFFFF) > 0x600000).int()
    power = -exponent - above
    for operand, dtype in enumerate(DTYPES):
        power[:, operand] += math.frexp(torch.finfo(dtype).max)[1] - 1
    power = power.clamp(-126, 126)
    return torch.where(amax > 0, ((power + 127) << 23).view(torch.float32), 1.0)


def rounded(values: Tensor, scale: Tensor, operand: int, share: float = 1.0) -> Tensor:
    """`values · share · scale` in eight bits, as bytes. Values beyond the largest number become that number."""
    dtype = DTYPES[operand]
    most = torch.finfo(dtype).max
    wide = values.to(torch.promote_types(values.dtype, torch.float32)) * scale
    if share != 1:
        wide = wide * share
    return wide.clamp_(-most, most).to(dtype).view(torch.uint8)


@dataclass
class LayerFP8:
    """One layer's operands."""

    history: AmaxHistory
    layer: str
    weight: Weight
    _measured: tuple[Version, int] | None = None  # the weight's values that were measured last

    @property
    def version(self) -> int:
        """For `Weight`: the version of the scales."""
        return self.history.version

    def rounded(self, shard: Tensor) -> tuple[Tensor, Tensor | None]:
        """For `Weight`."""
        scale = self.history.scale(self.layer, WEIGHT)
        return (shard, None) if scale is None else (rounded(shard, scale, WEIGHT), scale)

    @property
    def ready(self) -> bool:
        """Whether the layer rounds: after the first step."""
        return self.history.scales is not None

    @property
    def scales(self) -> Tensor:
        return self.history.scales_of(self.layer)

    def in_compiled(self, linear: nn.Module) -> None:
        """Make a layer of a compiled block round its operands; `scales` is an argument of each call."""
        linear.__class__ = FP8WgradLinear
        linear.register_buffer("scales", None)
        linear.parts = self.history.samples_parts  # type: ignore[assignment]

    def use(self, measures: bool, dtype: torch.dtype) -> FP8Matmul | MeasuredMatmul | None:
        """The product of one use of the layer; None if it is the model's own. `measures`: a training's first forward."""
        if measures:
            self._measure_weight(self.weight.parameter)
        if self.history.scales is None:
            return MeasuredMatmul(self) if measures else None
        return FP8Matmul(self, measures, dtype)

    def _measure_weight(self, parameter: nn.Parameter) -> None:
        """Once a step, and not in every micro-batch."""
        now = version_of(parameter), self.version
        if now != self._measured:
            self._measured = now
            self.history.measure(self.layer, WEIGHT, local_of(parameter))


class MeasuredMatmul(Matmul):
    """A product in the model's dtype that measures its operands; the weight is measured before it is gathered."""

    def __init__(self, of: LayerFP8) -> None:
        self._of = of

    def operands(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """X and dY for `weight_gradient`, after a forward in compiled code."""
        self._of.history.measure(self._of.layer, INPUT, x)
        return x, gradient

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self._of.history.measure(self._of.layer, INPUT, x)
        return super().forward(x, weight, bias)

    def weight_gradient(
        self, gradient: Tensor, x: Tensor, shape: torch.Size, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        self._of.history.measure(self._of.layer, GRADIENT, gradient)
        return super().weight_gradient(gradient, x, shape, into, dtype)

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        self._of.history.measure(self._of.layer, GRADIENT, gradient)
        return super().input_gradient(gradient, weight, shape)


class FP8Matmul(Matmul):
    """One use of a layer: products of rounded operands, in `dtype`. `input` and `gradient` are moved rounded, as bytes."""

    def __init__(self, of: LayerFP8, measures: bool, dtype: torch.dtype) -> None:
        history = of.history
        assert history.scales is not None
        self._of, self._measures, self._dtype = of, measures, dtype
        # A step may end between this forward and its backward.
        self._scales = [history.scale(of.layer, operand) for operand in range(len(OPERANDS))]
        self._parts = history.samples_parts
        self.input = Payload(self._input)
        self.output_gradient = Payload(self._gradient)

    def operands(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """X and dY for `weight_gradient`, after a forward in compiled code: measured and rounded now."""
        return self._input(x), self._gradient(gradient)

    def _scale(self, operand: int) -> Tensor:
        scale = self._of.weight.scale if operand == WEIGHT else self._scales[operand]
        assert scale is not None
        return scale

    def _input(self, x: Tensor) -> Tensor:
        if self._measures:
            self._of.history.measure(self._of.layer, INPUT, x)
        return rounded(x.detach(), self._scale(INPUT), INPUT)

    def _gradient(self, gradient: Tensor) -> Tensor:
        self._of.history.measure(self._of.layer, GRADIENT, gradient)
        return rounded(gradient, self._scale(GRADIENT), GRADIENT, 1 / self._parts).contiguous()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None  # it is added to the result
        rows = self._operand(x.flatten(0, -2), INPUT)
        y = rows.product(self._operand(weight, WEIGHT), self._dtype, fast=True)
        return torch_private.same_values(y.unflatten(0, x.shape[:-1]))

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        rows = self._operand(gradient.flatten(0, -2), GRADIENT)
        return rows.product(self._operand(weight, WEIGHT).t(), self._dtype).view(shape)

    def weight_gradient(
        self, gradient: Tensor, x: Tensor, shape: torch.Size, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        dy, of_x = self._operand(gradient.flatten(0, -2), GRADIENT), self._operand(x.flatten(0, -2), INPUT)
        return dy.t().product(of_x.t(), dtype, into)

    def _operand(self, values: Tensor, operand: int) -> _Operand:
        return _Operand.of(values, self._scale(operand), operand, self._parts)


@dataclass(frozen=True)
class _Operand:
    """A matrix in eight bits, and what its values are multiplied with."""

    values: Tensor
    factor: Tensor

    @classmethod
    def of(cls, values: Tensor, scale: Tensor, operand: int, parts: int) -> _Operand:
        factor = parts if operand == GRADIENT else 1
        return cls(values.view(DTYPES[operand]), scale.reciprocal() * factor)

    def t(self) -> _Operand:
        return _Operand(self.values.t(), self.factor)

    def product(self, other: _Operand, dtype: torch.dtype, into: Tensor | None = None, fast: bool = False) -> Tensor:
        """`self · otherᵀ` in this dtype, added to `into`. `fast`: it may be summed with fewer bits.

        Where the device has no such matmul, or not for these sizes, the same rounded operands are multiplied in `dtype`.
        """
        left, right = self.values, other.values
        aligned = all(size % _ALIGNED == 0 for size in (*left.shape, *right.shape))
        if aligned and dtype.itemsize <= 4 and devices.multiplies_fp8(left.device):
            found = torch_private.scaled_product(left, right, (self.factor, other.factor), dtype, fast)
            return add_to(into, found)
        return add_product(into, self._wide(dtype), other._wide(dtype).t(), dtype)

    def _wide(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype) * self.factor.to(dtype)


class FP8WgradLinear(DeferredWgradLinear):
    """In a compiled block: rounds its operands. Its weight gradient's are rounded where that is computed."""

    scales: Tensor  # of its operands
    parts: int  # ranks over whose samples the loss is averaged

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _RoundedLinear.apply(x, self.weight, self.scales, self.parts)
        y = seen_by(self.of_output, y)
        y = y if self.bias is None else y + self.bias
        return handing_out(x, self.of_input, y)


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(weight, scales)
        ctx.parts = parts
        of_x, of_weight = (_rounded_operand(each, scales, operand) for operand, each in enumerate((x, weight)))
        return of_x.product(of_weight, x.dtype, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        weight, scales = ctx.saved_tensors
        of_gradient = _rounded_operand(gradient, scales, GRADIENT, ctx.parts)
        dx = of_gradient.product(_rounded_operand(weight, scales, WEIGHT).t(), gradient.dtype)
        return dx.unflatten(0, gradient.shape[:-1]), None, None, None


def _rounded_operand(values: Tensor, scales: Tensor, operand: int, parts: int = 1) -> _Operand:
    share = 1 / parts if operand == GRADIENT else 1.0
    return _Operand.of(rounded(values.flatten(0, -2), scales[operand], operand, share), scales[operand], operand, parts)
