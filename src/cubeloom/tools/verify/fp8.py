"""The serial reference of FP8: the plain model, whose linears round their operands by the rule of docs/fp8.md.

It is written for itself: it shares neither scales, rounding nor products with `parallel.fp8`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[dict[str, Tensor], int], float]
STEPS = 16
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class _Operand:
    """One operand of one linear: its largest values in this step and in the last ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.now = 0.0
        self.steps: deque[float] = deque(maxlen=STEPS)

    def rounded(self, values: Tensor) -> Tensor:
        self.now = max(self.now, values.abs().max().item())
        if not self.steps:
            return values
        largest, before = LARGEST[self.dtype], max(self.steps)
        scale = 2.0 ** math.floor(math.log2(largest / before)) if before else 1.0
        scaled = (values.double() * scale).clamp(-largest, largest)
        return (scaled.to(self.dtype).double() / scale).to(values.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, operands: dict[str, _Operand]) -> Tensor:
        x, weight = operands["x"].rounded(x), operands["w"].rounded(weight)
        ctx.save_for_backward(x, weight)
        ctx.operands = operands
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dy = ctx.operands["dy"].rounded(gradient)
        return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2), None


def rounding(model: nn.Module, layers: Iterable[str], step_on: Step) -> Step:
    """The step of a model whose linears of these names round their operands."""
    fp8 = SerialFP8(model, layers)

    def step(data: dict[str, Tensor], number: int) -> float:
        loss = step_on(data, number)
        fp8.end_step()
        return loss

    return step


class SerialFP8:
    """Replaces the forward of these linears of a model. `end_step` must follow each backward."""

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        self._operands: list[_Operand] = []
        for name in layers:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            of = {"x": torch.float8_e4m3fn, "w": torch.float8_e4m3fn, "dy": torch.float8_e5m2}
            operands = {key: _Operand(dtype) for key, dtype in of.items()}
            self._operands += operands.values()
            linear.forward = self._forward(linear, operands)  # type: ignore[method-assign]

    def _forward(self, linear: nn.Linear, operands: dict[str, _Operand]) -> Any:
        def forward(x: Tensor) -> Tensor:
            y: Tensor = _Product.apply(x, linear.weight, operands)
            return y if linear.bias is None else y + linear.bias

        return forward

    def end_step(self) -> None:
        for operand in self._operands:
            operand.steps.append(operand.now)
            operand.now = 0.0
