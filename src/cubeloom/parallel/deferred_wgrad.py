"""Computes the weight gradients of a compiled block's linear layers outside of the compiled code.

The compiler creates one backward of a block, with all of its gradients. For a deferred weight it returns the operands
of the gradient's matmul instead: tokens stand for the weight among the inputs of the compiled function, and their
"gradients" are the layer's input and the gradient of its output. The matmul can then accumulate into the sum of earlier
micro-batches in one pass, and can be deferred.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from cubeloom.base import torch_private

Shapes = tuple[torch.Size, torch.Size]  # of a layer's input and output


@dataclass(frozen=True)
class Token:
    """Stands for a weight among the inputs of compiled code, and gets as its "gradient" what the weight's needs."""

    shape: torch.Size
    dtype: torch.dtype | None = None  # None: the weight's


class DeferredWgradLinear(nn.Linear):
    of_input: Tensor
    of_output: Tensor

    @staticmethod
    def tokens(shapes: Shapes) -> dict[str, Token]:
        """By name."""
        return {"of_input": Token(shapes[0]), "of_output": Token(shapes[1])}

    def forward(self, x: Tensor) -> Tensor:
        y = seen_by(self.of_output, functional.linear(x, self.weight, self.bias))
        return handing_out(x, self.of_input, y)


def seen_by(token: Tensor, y: Tensor) -> Tensor:
    """Returns `y`; its gradient also becomes the token's."""
    found: Tensor = _SeenBy.apply(y, token)
    return found


class _SeenBy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


def handing_out(what: Tensor, token: Tensor, y: Tensor) -> Tensor:
    """Returns `y`; when its gradient is computed, `what` becomes the token's gradient."""
    found: Tensor = _HandingOut.apply(what, token, y)
    return found


class _HandingOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: Tensor, token: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(what)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        (what,) = ctx.saved_tensors
        return None, what, gradient


@dataclass(frozen=True)
class DeferredWgradBlock:
    """A plain block with deferred weight gradients in some of its layers, for calls of one kind."""

    block: nn.Module
    tokens: Mapping[str, Mapping[str, Token]]  # by layer, by name

    @classmethod
    def of(
        cls,
        plain: nn.Module,
        parameters: Mapping[str, Tensor],
        arguments: tuple[Any, ...],
        named: Mapping[str, Any] | None = None,
        kinds: Mapping[str, Callable[[nn.Module], None]] | None = None,
    ) -> DeferredWgradBlock:
        """Defers each linear layer that such a call passes through exactly once and whose weight no other layer shares.

        `kinds`: what makes another kind of deferred layer of some of them.
        """
        block = deepcopy(plain)
        shapes = _shapes(block, parameters, arguments, dict(named or {}))
        tokens: dict[str, Mapping[str, Token]] = {}
        for name, of_layer in shapes.items():
            layer: Any = block.get_submodule(name)
            layer.__class__ = DeferredWgradLinear
            if kinds is not None and name in kinds:
                kinds[name](layer)
            tokens[name] = layer.tokens(of_layer)
            for token in tokens[name]:
                layer.register_buffer(token, None)
        return cls(block, tokens)


def within(layer: str, name: str) -> str:
    """The name in the block of something inside a layer; the layer may be the block itself."""
    return f"{layer}.{name}" if layer else name


def _shapes(
    block: nn.Module, parameters: Mapping[str, Tensor], arguments: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Shapes]:
    """The input and output shapes of the layers that can be deferred, from a call without computation."""
    uses = Counter(id(each) for _, each in block.named_parameters(remove_duplicate=False))
    calls: dict[str, list[Shapes]] = defaultdict(list)

    def seen(name: str, _: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
        calls[name].append((given[0].shape, y.shape))

    hooks = [
        layer.register_forward_hook(partial(seen, name))
        for name, layer in block.named_modules()
        if type(layer) is nn.Linear and uses[id(layer.weight)] == 1
    ]
    with torch_private.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        functional_call(block, dict(parameters), arguments, named)
    for hook in hooks:
        hook.remove()
    return {name: each[0] for name, each in calls.items() if len(each) == 1}
