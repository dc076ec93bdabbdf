"""The local operation of a linear layer: a matmul, or a convolution with features as its inner dimension.

Both are linear in the input and in the weight, so sums over parts of the inner dimension and over samples give the
whole result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base import torch_private
from cubeloom.parallel.cut import CutError

Convolution = torch_private.AnyConvolution


class Product(Protocol):
    """Y from X, W and an optional bias, and their gradients."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor: ...

    def weight_gradient(
        self, gradient: Tensor, x: Tensor, shape: torch.Size, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The weight gradient in this dtype, added to `into` if there is an earlier one."""
        ...

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor: ...

    def bias(self, bias: Tensor) -> Tensor:
        """A bias, reshaped so that it can be added to Y."""
        ...


def add_to(into: Tensor | None, found: Tensor) -> Tensor:
    """A gradient, added to an earlier one if there is one."""
    return found if into is None else into.add_(found)


def add_product(into: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`left @ right` in this dtype. The matmul itself adds it to an earlier gradient, in one pass.

    If the dtype is wider than the operands', the result is not rounded to theirs: GPUs have matmuls with wider outputs,
    and on a CPU the operands are widened.
    """
    if left.dtype == dtype:
        return left @ right if into is None else into.addmm_(left, right)
    if left.is_cuda:
        if into is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(into, left, right, out_dtype=dtype, out=into)
    if into is None:
        into = left.new_zeros(left.shape[0], right.shape[1], dtype=dtype)
    _add_widened(into, left, right)
    return into


# One operation, so that a rehearsal does not count the widened operands, which do not exist on a GPU.
@torch.library.custom_op(
    "cubeloom::add_widened", mutates_args=("into",), schema="(Tensor(a!) into, Tensor left, Tensor right) -> ()"
)
def _add_widened(into: Tensor, left: Tensor, right: Tensor) -> None:
    into.addmm_(left.to(into.dtype), right.to(into.dtype))


@_add_widened.register_fake
def _(into: Tensor, left: Tensor, right: Tensor) -> None: ...


class Matmul:
    """`X[…, K] · W[N, K]ᵀ`."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = functional.linear(x, weight, bias)
        # With a bias and more than two dimensions torch returns a view, which a model could not change in place.
        return y if y.dim() <= 2 else torch_private.same_values(y)

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return gradient @ weight

    def weight_gradient(
        self, gradient: Tensor, x: Tensor, shape: torch.Size, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return add_product(into, gradient.flatten(0, -2).t(), x.flatten(0, -2), dtype)

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        return gradient.flatten(0, -2).sum(0, dtype=dtype)

    def bias(self, bias: Tensor) -> Tensor:
        return bias


class MatmulByInput(Matmul):
    """`X[…, K] · W[K, N]`."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight.t(), bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return gradient @ weight.t()

    def weight_gradient(
        self, gradient: Tensor, x: Tensor, shape: torch.Size, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return add_product(into, x.flatten(0, -2).t(), gradient.flatten(0, -2), dtype)


@dataclass(frozen=True)
class Convolve:
    """`X[samples, K, …]` with `W[N, K, …]`, or `W[K, N, …]` if it is transposed."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int = 1

    @classmethod
    def like(cls, layer: Convolution, groups: int = 1) -> Convolve:
        return cls(
            tuple(layer.stride),
            _padding(layer),
            tuple(layer.dilation),
            layer.transposed,
            tuple(layer.output_padding),
            groups,
        )

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.convolution(x, weight, bias, *self._options)

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        # Only the shape of the input matters for its gradient.
        return self._backward(gradient, gradient.new_empty(1).expand(shape), weight, [True, False, False])[0]

    def weight_gradient(
        self, gradient: Tensor, x: Tensor, shape: torch.Size, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        found = self._backward(gradient, x, gradient.new_empty(1).expand(shape), [False, True, False])[1]
        return add_to(into, found.to(dtype))

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        return gradient.transpose(0, 1).flatten(1).sum(1, dtype=dtype)

    def bias(self, bias: Tensor) -> Tensor:
        return bias.view(-1, *[1] * len(self.stride))

    def _backward(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, *self._options, wanted
        )
        return found

    @property
    def _options(self) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        return (
            list(self.stride),
            list(self.padding),
            list(self.dilation),
            self.transposed,
            list(self.output_padding),
            self.groups,
        )


def _padding(layer: Convolution) -> tuple[int, ...]:
    """Padding as numbers. "same" pads both sides equally if the kernel is odd; other kernels are refused."""
    if layer.padding_mode != "zeros":
        raise CutError(f"a convolution with padding_mode={layer.padding_mode!r} has no form here; only 'zeros' has")
    if layer.padding == "valid":
        return (0,) * len(layer.stride)
    if layer.padding == "same":
        widths = [dilation * (size - 1) for dilation, size in zip(layer.dilation, layer.kernel_size, strict=True)]
        if any(width % 2 for width in widths):
            raise CutError(
                f"padding='same' of a kernel {layer.kernel_size} pads more on one side, which has no form here"
            )
        return tuple(width // 2 for width in widths)
    assert not isinstance(layer.padding, str)
    return tuple(layer.padding)


def product_of(layer: nn.Module, groups: int = 1) -> Product:
    """The local operation of a linear or a convolution."""
    if isinstance(layer, Convolution):
        return Convolve.like(layer, groups)
    return MatmulByInput() if is_conv1d(layer) else Matmul()


def is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's linear of GPT-2, which stores its weight as [K, N]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def sizes(name: str, module: nn.Linear | Convolution) -> tuple[int, int, int]:
    """Input features, output features, and the weight's elements per pair of features."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features, 1
    Convolve.like(module)  # refuses unsupported options
    if module.groups > 1:
        raise CutError(f"layer {name} is a convolution in {module.groups} groups; the cut can take it as Grouped")
    return module.in_channels, module.out_channels, math.prod(module.kernel_size)
