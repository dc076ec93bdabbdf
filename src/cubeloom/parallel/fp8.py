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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.comm import Network
from cubeloom.parallel.collective import Payload
from cubeloom.parallel.config import ShardingPolicy
from cubeloom.parallel.deferred_wgrad import DeferredWgradLinear, Shapes, Token
from cubeloom.parallel.fp8_operations import (
    DTYPES,
    GRADIENT,
    INPUT,
    WEIGHT,
    fp8_product,
    largest,
    round_to_fp8,
    transposed,
)
from cubeloom.parallel.gradients import Gradients
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.products import Matmul, add_to
from cubeloom.parallel.specs import LayerSpec, fp8_layers
from cubeloom.parallel.weight import Weight

AMAX = "largest operands"  # the history in a checkpoint
STEPS = 16  # of which the largest values are remembered
Factors = tuple[Tensor, Tensor]  # what the values of a product's operands are multiplied with


class AmaxHistory:
    """The largest absolute values of the operands of a model's FP8 layers: the same on all ranks."""

    def __init__(self, layers: Sequence[str], network: Network) -> None:
        grid = network.grid
        self.samples_parts = grid.data * grid.z
        self.version = 0  # of the scales; 0 before the first step has ended
        self.weights: dict[str, nn.Parameter] = {}  # of this rank's layers
        self.in_place = False  # scales stay where they are in memory, as recorded steps need
        self._places = {name: place for place, name in enumerate(layers)}
        self._axis = network.across(tuple(range(grid.pipe)), "data", "z", "y", "x")
        self._now = torch.zeros(len(layers), len(DTYPES), device=network.device)
        self._steps = self._now.new_zeros(0, *self._now.shape)
        ones = torch.ones_like(self._now)
        self._scales, self._factors = apart(ones), apart(ones)

    @property
    def ready(self) -> bool:
        """Whether layers round: after the first step."""
        return self.version > 0

    def scales_of(self, layer: str) -> Tensor:
        """By operand, what values are multiplied with before they are rounded."""
        return self._scales[self._places[layer], :, 0]

    def factors_of(self, layer: str) -> Tensor:
        """By operand, what rounded values are multiplied with in a product."""
        return self._factors[self._places[layer], :, 0]

    def measure(self, layer: str, operand: int, found: Tensor) -> None:
        """`found`: the largest absolute value of some of the operand."""
        slot = self._now[self._places[layer], operand]
        slot.copy_(torch.maximum(slot, found))

    def end_step(self) -> None:
        """All gradients of a step are final: agree with the other ranks, and choose the scales of the next step."""
        self._measure_weights()
        now = self._axis.all_reduce_in_place(self._now.clone(), "largest operands", largest=True).wait()
        self._now.zero_()
        now[:, GRADIENT] /= self.samples_parts
        # A step that overflowed is skipped, and says nothing about the next.
        self._remember(torch.where(now.isfinite(), now, 0)[None])

    def _measure_weights(self) -> None:
        """Once a step, in few kernels, and not when they are used: they change at its end alone."""
        local = {name: local_of(parameter) for name, parameter in self.weights.items()}
        held = {name: shard for name, shard in local.items() if shard.numel()}
        if held:
            norms = torch_private.norms_of(list(held.values()), order=math.inf)
            found, nothing = dict(zip(held, norms, strict=True)), torch.zeros_like(norms[0])
            self._now[:, WEIGHT].copy_(torch.stack([found.get(name, nothing) for name in self._places]))

    def _remember(self, steps: Tensor) -> None:
        self._steps = torch.cat([self._steps, steps])[-STEPS:]
        self.version += 1
        scales = scales_of(self._steps.amax(0))
        factors = scales.reciprocal()
        factors[:, GRADIENT] *= self.samples_parts
        if self.in_place:
            self._scales.copy_(apart(scales))
            self._factors.copy_(apart(factors))
        else:
            # The backward of an earlier forward may still need the old ones.
            self._scales, self._factors = apart(scales), apart(factors)

    def state(self) -> dict[str, list[list[float]]]:
        """For a checkpoint: by layer, the values of each operand in the last steps."""
        found = self._steps.permute(1, 2, 0).tolist()
        return {name: found[place] for name, place in self._places.items()} if len(self._steps) else {}

    def load(self, state: Mapping[str, list[list[float]]]) -> None:
        """Take up the state of the same model on any grid. Layers without one have never been measured."""
        if not state:
            return
        steps = max(len(each[0]) for each in state.values())
        nothing = [[0.0] * steps] * len(DTYPES)
        found = torch.tensor([state.get(name, nothing) for name in self._places], dtype=self._now.dtype)
        self._steps = self._steps[:0]
        self._remember(found.permute(2, 0, 1).to(self._now.device))


def apart(numbers: Tensor) -> Tensor:
    """Each of the numbers first in a run of 16 bytes of its own: cuBLAS takes factors at such addresses only."""
    return numbers[..., None].repeat(*[1] * numbers.dim(), 16 // numbers.element_size())


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


@dataclass
class LayerFP8:
    """One layer's operands."""

    history: AmaxHistory
    layer: str
    weight: Weight

    def __post_init__(self) -> None:
        self.history.weights[self.layer] = self.weight.parameter

    @property
    def version(self) -> int:
        """For `Weight`: the version of the scales."""
        return self.history.version

    def rounded(self, shard: Tensor) -> tuple[Tensor, Tensor | None]:
        """For `Weight`: as bytes."""
        if not self.ready:
            return shard, None
        scale = self.scales[WEIGHT]
        return round_to_fp8(shard, scale, WEIGHT, 1.0, True, False)[0].view(torch.uint8), self.factors[WEIGHT]

    @property
    def ready(self) -> bool:
        return self.history.ready

    @property
    def scales(self) -> Tensor:
        return self.history.scales_of(self.layer)

    @property
    def factors(self) -> Tensor:
        return self.history.factors_of(self.layer)

    def in_compiled(self, linear: nn.Module) -> None:
        """Make a layer of a compiled block round its operands; scales and factors are arguments of each call."""
        linear.__class__ = FP8WgradLinear
        for name in SCALES:
            linear.register_buffer(name, None)
        linear.parts = self.history.samples_parts  # type: ignore[assignment]

    def compiled_use(self, measures: bool) -> Callable[..., Callable[..., Tensor]] | None:
        """As `use`, of compiled code: from what it hands out to the product of the weight gradient."""
        if not self.ready:
            return MeasuredMatmul(self).handed_out if measures else None
        return partial(self._handed_out, self.factors)

    def _handed_out(self, factors: Tensor, x: Tensor, gradient: Tensor, found: Tensor) -> Callable[..., Tensor]:
        for operand, each in zip((INPUT, GRADIENT), found.unbind(), strict=True):
            self.history.measure(self.layer, operand, each)
        return partial(_weight_gradient, gradient, x, (factors[GRADIENT], factors[INPUT]))

    def use(self, measures: bool, dtype: torch.dtype) -> FP8Matmul | MeasuredMatmul | None:
        """The product of one use of the layer; None if it is the model's own. `measures`: a training's first forward."""
        if not self.ready:
            return MeasuredMatmul(self) if measures else None
        return FP8Matmul(self, measures, dtype)


class MeasuredMatmul(Matmul):
    """A product in the model's dtype that measures its operands."""

    def __init__(self, of: LayerFP8) -> None:
        self._of = of

    def _measure(self, operand: int, values: Tensor) -> None:
        self._of.history.measure(self._of.layer, operand, largest(values))

    def handed_out(self, x: Tensor, gradient: Tensor) -> Callable[..., Tensor]:
        """The product of the weight gradient, after a forward in compiled code."""
        self._measure(INPUT, x)
        return partial(self.weight_gradient, gradient, x, torch.Size())

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self._measure(INPUT, x)
        return super().forward(x, weight, bias)

    def weight_gradient(
        self, gradient: Tensor, x: Tensor, shape: torch.Size, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        self._measure(GRADIENT, gradient)
        return super().weight_gradient(gradient, x, shape, into, dtype)

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        self._measure(GRADIENT, gradient)
        return super().input_gradient(gradient, weight, shape)


class FP8Matmul(Matmul):
    """One use of a layer: products of rounded operands, in `dtype`. `input` and `gradient` are moved rounded, as bytes."""

    def __init__(self, of: LayerFP8, measures: bool, dtype: torch.dtype) -> None:
        self._of, self._measures, self._dtype = of, measures, dtype
        # A step may end between this forward and its backward.
        self._scales, self._factors = of.scales, of.factors
        self._parts = of.history.samples_parts
        self.input = Payload(self._input)
        self.output_gradient = Payload(self._gradient)

    def _input(self, x: Tensor) -> Tensor:
        return self._rounded(x.detach(), INPUT, 1.0, self._measures)

    def _gradient(self, gradient: Tensor) -> Tensor:
        return self._rounded(gradient, GRADIENT, 1 / self._parts, True)

    def _rounded(self, values: Tensor, operand: int, share: float, measures: bool) -> Tensor:
        rows, _, found = round_to_fp8(values.flatten(0, -2), self._scales[operand], operand, share, True, False)
        if measures:
            self._of.history.measure(self._of.layer, operand, found)
        return rows.view(torch.uint8).view(values.shape)

    def _factors_of(self, left: int, right: int) -> Factors:
        of_weight = self._of.weight.scale
        found = [of_weight if operand == WEIGHT else self._factors[operand] for operand in (left, right)]
        assert found[0] is not None and found[1] is not None
        return found[0], found[1]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None  # it is added to the result
        rows = x.flatten(0, -2).view(DTYPES[INPUT])
        factors = self._factors_of(INPUT, WEIGHT)
        y = fp8_product(rows, weight.view(DTYPES[WEIGHT]), *factors, self._dtype, fast=True)
        return torch_private.same_values(y.unflatten(0, x.shape[:-1]))

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        rows, turned = gradient.flatten(0, -2).view(DTYPES[GRADIENT]), transposed(weight).view(DTYPES[WEIGHT])
        return fp8_product(rows, turned, *self._factors_of(GRADIENT, WEIGHT), self._dtype).view(shape)

    def weight_gradient(
        self, gradient: Tensor, x: Tensor, shape: torch.Size, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        dy, of_x = (transposed(each.flatten(0, -2)) for each in (gradient, x))
        factors = self._factors_of(GRADIENT, INPUT)
        return _weight_gradient(dy.view(DTYPES[GRADIENT]), of_x.view(DTYPES[INPUT]), factors, into, dtype)


def _weight_gradient(gradient: Tensor, x: Tensor, factors: Factors, into: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Of both operands transposed, in this dtype, added to `into` if there is an earlier one."""
    return add_to(into, fp8_product(gradient, x, *factors, dtype))


SCALES = ("scales", "factors")  # of an FP8WgradLinear


class FP8WgradLinear(DeferredWgradLinear):
    """In a compiled block: rounds its operands, and hands out those of its weight gradient rounded and transposed."""

    scales: Tensor  # by operand
    factors: Tensor
    of_largest: Tensor
    parts: int  # ranks over whose samples the loss is averaged

    @staticmethod
    def tokens(shapes: Shapes) -> dict[str, Token]:
        x, y = ((each[-1], each[:-1].numel()) for each in shapes)
        return {
            "of_input": Token(torch.Size(x), DTYPES[INPUT]),
            "of_output": Token(torch.Size(y), DTYPES[GRADIENT]),
            "of_largest": Token(torch.Size((2,)), torch.float32),
        }

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.of_input, self.of_output, self.of_largest
        y: Tensor = _RoundedLinear.apply(x, self.weight, self.scales, self.factors, self.parts, *tokens)
        return y if self.bias is None else y + self.bias


class _RoundedLinear(torch.autograd.Function):
    """`X Wᵀ` of rounded operands. The gradients of the last three inputs are what the weight gradient needs: `tokens`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, factors: Tensor, parts: int, *tokens: Tensor
    ) -> Tensor:
        rows, turned, found = round_to_fp8(x.flatten(0, -2), scales[INPUT], INPUT, 1.0, True, True)
        of_weight, _, _ = round_to_fp8(weight, scales[WEIGHT], WEIGHT, 1.0, True, False)
        ctx.save_for_backward(weight, scales, factors, turned, found)
        ctx.parts = parts
        y = fp8_product(rows, of_weight, factors[INPUT], factors[WEIGHT], x.dtype, fast=True)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, scales, factors, of_x, found_x = ctx.saved_tensors
        dy = gradient.flatten(0, -2)
        rows, turned, found = round_to_fp8(dy, scales[GRADIENT], GRADIENT, 1 / ctx.parts, True, True)
        _, of_weight, _ = round_to_fp8(weight, scales[WEIGHT], WEIGHT, 1.0, False, True)
        dx = fp8_product(rows, of_weight, factors[GRADIENT], factors[WEIGHT], gradient.dtype)
        both = torch.stack([found_x, found])
        return dx.unflatten(0, gradient.shape[:-1]), None, None, None, None, of_x, turned, both
