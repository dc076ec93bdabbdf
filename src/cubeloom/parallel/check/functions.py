"""Autograd functions of a model. A run sees the operations of their forward, but not those of their backward.

Therefore the backward is run too, without values, as soon as a result of the forward is used: under the same mode, and
for gradients with the layout of the results. Each gradient that it returns must have the layout of its input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from cubeloom.base import torch_private


@dataclass(frozen=True)
class Function:
    """One call of an autograd function: the tensors that need gradients, in order, and its results."""

    node: BackwardCFunction
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        return torch_private.function_of(self.node).__name__

    def gradients(self, given: Iterable[Tensor]) -> list[Any]:
        """The gradients that its backward returns for the inputs that need gradients."""
        # This is `apply` of the node's class, which calls the backward, and not `apply` of the user's function.
        found = self.node.apply(*given)
        found = found if isinstance(found, tuple) else (found,)
        return [each for each, needed in zip(found, self.node.needs_input_grad, strict=False) if needed]


def node_of(tensor: Tensor) -> BackwardCFunction | None:
    """The node of an autograd function's result. Those of torch are correct, and some run the model again."""
    node = tensor.grad_fn
    if not isinstance(node, BackwardCFunction) or torch_private.function_of(node).__module__.startswith("torch."):
        return None
    return node


def function_of(node: BackwardCFunction, result: Tensor, seen: Iterable[Tensor]) -> Function:
    """`seen`: all tensors of the run, which include its inputs and results."""
    makers: list[tuple[Any, int]] = [place for place in node.next_functions if place[0] is not None]
    outputs, inputs = {result.output_nr: result}, dict[Any, Tensor]()
    for tensor in seen:
        place = tensor.grad_fn, tensor.output_nr
        if isinstance(place[0], BackwardCFunction) and place[0] is node:
            outputs[tensor.output_nr] = tensor
        elif place in makers:
            inputs[place] = tensor
    inputs |= {place: place[0].variable for place in makers if isinstance(getattr(place[0], "variable", None), Tensor)}
    return Function(node, tuple(map(inputs.get, makers)), tuple(outputs[number] for number in sorted(outputs)))


def same_memory(first: Tensor, second: Tensor) -> bool:
    return torch_private.storage_identity(first) == torch_private.storage_identity(second)
