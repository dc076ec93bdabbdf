"""A fused tensor taken apart. In compiled code the gradients of its parts are computed where they belong in its own.

`cat` of computed tensors is one kernel that asks of every number of the joined tensor which part it is of, and computes what
each part would be there: twice the reads, and of SwiGLU's backward twice the sigmoids. Written part by part, parts that
read the same are one kernel that reads it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cubeloom.base import torch_private


def parts_of(fused: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """`fused.split(sizes, dim)`; not slices, each gradient of which would be laid into zeros, and these be added."""
    if torch.compiler.is_compiling():
        found: tuple[Tensor, ...] = _Parts.apply(fused, list(sizes), dim % fused.dim())
        return found
    return fused.split(list(sizes), dim)


@torch.library.custom_op("cubeloom::join", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim)


@_join.register_fake
def _(parts: Sequence[Tensor], dim: int) -> Tensor:
    # The compiler comes here first, and only the compiler does.
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
