"""Two linear layers with GELU between them. In compiled code on a GPU, GELU is fused into their matmuls.

The activation between the layers is the widest of a block. A separate GELU kernel reads and writes it once more in the
forward, and twice in the backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base import torch_private
from cubeloom.parallel import cublaslt
from cubeloom.parallel.deferred_wgrad import DeferredWgradLinear, handing_out, seen_by


@cache
def fused_class(kind: Any, layers: tuple[str, str, str], then: tuple[str, ...]) -> type[nn.Module]:
    """A class of modules of this kind that calls the three layers with these names as one, and then the others.

    All blocks share one class: anything that differs between blocks, such as their own forward, would be compiled per
    block.
    """

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        up, between, down = (getattr(self, name) for name in layers)
        y = feed_forward(x, up, between, down)
        for name in then:
            y = getattr(self, name)(y)
        return y

    return type(kind.__name__, (kind,), {"forward": forward})


def feed_forward(x: Tensor, up: nn.Module, between: nn.Module, down: nn.Module) -> Tensor:
    """`down(between(up(x)))`."""
    if torch.compiler.is_compiling() and _fits(x, up, between, down):
        layers = up.weight, up.bias, down.weight, down.bias
        if isinstance(up, DeferredWgradLinear) and isinstance(down, DeferredWgradLinear):
            y, after, _ = up_gelu_down(x, *layers, up.of_output)
            y = handing_out(after, down.of_input, seen_by(down.of_output, y))
            return handing_out(x, up.of_input, y)
        y, _, _ = up_gelu_down(x, *layers)
        return y
    found: Tensor = down(between(up(x)))
    return found


def _fits(x: Tensor, up: nn.Module, between: nn.Module, down: nn.Module) -> bool:
    """Whether the layers are whole on a GPU and its matmuls can apply their GELU."""
    return (
        type(up) is type(down) in (nn.Linear, DeferredWgradLinear)
        and up.bias is not None
        and down.bias is not None
        and isinstance(between, nn.GELU)
        and between.approximate == "tanh"
        and x.is_cuda
        and x.dim() == 2
        and x.dtype is torch.bfloat16
        and _available()
    )


@torch_private.constant_to_compiler
def _available() -> bool:
    return cublaslt.available()


# The compiler calls this as it is and fuses the code around it, also in the backward.
@torch.library.custom_op(
    "cubeloom::up_gelu_down",
    mutates_args=(),
    schema="(Tensor x, Tensor up, Tensor up_bias, Tensor down, Tensor down_bias, Tensor? token=None)"
    " -> (Tensor, Tensor, Tensor)",
)
def up_gelu_down(
    x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, token: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Two linear layers with GELU between them. Also returns the output and input of GELU, for the backward.

    If there is a token, its gradient is that of GELU's input (see `parallel.deferred_wgrad`).
    """
    found = cublaslt.linear_gelu(x, up, up_bias)
    if found is None:
        before = functional.linear(x, up, up_bias)
        found = functional.gelu(before, approximate="tanh"), before
    return functional.linear(found[0], down, down_bias), *found


@up_gelu_down.register_fake
def _(
    x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, token: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(x)
    return x.new_empty(rows, len(down)), x.new_empty(rows, len(up)), x.new_empty(rows, len(up))


@torch.library.custom_op(
    "cubeloom::gelu_gradient", mutates_args=(), schema="(Tensor gradient, Tensor weight, Tensor before) -> Tensor"
)
def gelu_gradient(gradient: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """The gradient of GELU's input, from that of the second linear layer's output."""
    found = cublaslt.gelu_gradient(gradient, weight, before)
    if found is None:
        found = torch.ops.aten.gelu_backward(gradient @ weight, before, approximate="tanh")
    return found


@gelu_gradient.register_fake
def _(gradient: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    return torch.empty_like(before)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, up, _, down, _, token = inputs
    ctx.tapped = token is not None
    ctx.save_for_backward(x, up, down, *output[1:])


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, up, down, after, before = ctx.saved_tensors
    wide = gelu_gradient(gradient, down, before)
    # The compiler drops the unused ones: gradients of weights that are deferred.
    layers = wide.t() @ x, wide.sum(0), gradient.t() @ after, gradient.sum(0)
    return wide @ up, *layers, wide if ctx.tapped else None


up_gelu_down.register_autograd(_backward, setup_context=_keep)
