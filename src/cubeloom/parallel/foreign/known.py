"""Which modules are linears or convolutions, of what sizes, and which of those have a form on the cube."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base import torch_private
from cubeloom.parallel.cut import CutError
from cubeloom.parallel.products import Convolution, Convolve, Matmul, Product, add_product

# These types and no others: a subclass may compute something else.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Sizes:
    """Of a linear, or of a convolution with `kernel_numel` numbers for each pair of features."""

    k: int
    n: int
    bias: bool
    kernel_numel: int = 1
    transposed: bool = False  # the weight is stored [K, N, …]
    dim: int = -1  # the dimension of its input and output that is features
    rank: int | None = None  # how many dimensions its input must have, or any number from two up


def sizes_of(module: nn.Module) -> Sizes | None:
    """Its sizes, if it is a linear or a convolution."""
    if type(module) is nn.Linear:
        return Sizes(module.in_features, module.out_features, module.bias is not None)
    if _is_conv1d(module):
        weight = module.weight
        assert isinstance(weight, Tensor)
        return Sizes(weight.shape[0], weight.shape[1], bias=True, transposed=True)
    if isinstance(module, Convolution) and type(module) in _CONVOLUTIONS:
        return Sizes(
            module.in_channels,
            module.out_channels,
            module.bias is not None,
            prod(module.kernel_size),
            module.transposed,
            dim=1,
            rank=len(module.kernel_size) + 2,
        )
    return None


def why_not(module: nn.Module) -> str | None:
    """Why this linear or convolution has no form here, in words."""
    if isinstance(module, Convolution):
        if module.groups > 1:
            return f"a convolution in {module.groups} groups"
        try:
            Convolve.like(module)
        except CutError as error:
            return str(error)
    if torch_private.has_hooks(module):
        return "it has hooks"
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return "it is frozen"
    return None


def product_of(module: nn.Module) -> Product:
    """What it computes on local blocks."""
    if isinstance(module, Convolution):
        return Convolve.like(module)
    return Matmul() if isinstance(module, nn.Linear) else _StoredByInput()


def _is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear in Hugging Face, which stores its weight [K, N]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


class _StoredByInput(Matmul):
    """`X[…, K] · W[K, N]`."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight.t(), bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return gradient @ weight.t()

    def weight_gradient(
        self, gradient: Tensor, x: Tensor, shape: torch.Size, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        return add_product(into, x.flatten(0, -2).t(), gradient.flatten(0, -2), dtype)
