"""Splits a fused tensor. In compiled code the gradients of its parts are computed directly into the fused gradient.

The compiler turns `cat` of computed tensors into one kernel that asks for every element which part it belongs to, and
computes all parts there: twice the reads, and for SwiGLU's backward twice the sigmoids. Written part by part, parts
that read the same inputs are one kernel that reads them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cubeloom.base import torch_private


def parts_of(fused: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """`fused.split(sizes, dim)`; not slices, whose gradients would each be padded with zeros and then added."""
    if torch.compiler.is_compiling():
        found: tuple[Tensor, ...] = _Parts.apply(fused, list(sizes), dim % fused.dim())
        return found
    return fused.split(list(sizes), dim)


@torch.library.custom_op("cubeloom::join", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim)


@_join.register_fake
def _(parts: Sequence[Tensor], dim: int) -> Tensor:
    # Only the compiler calls this, and before anything else.
    torch_private.compile_part_by_part(torch.ops.cubeloom.join.default)
    return torch.cat(list(parts), dim)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Tensor, sizes: list[int], dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return fused.split(sizes, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _join(gradients, ctx.dim), None, None
