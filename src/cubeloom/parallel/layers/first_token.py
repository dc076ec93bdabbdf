"""The first token of each sequence, with whole features, on every rank of x and y."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.parallel.layers.declared import Declared, Making, Seen, make_layer
from cubeloom.parallel.specs import FirstTokenSpec
from cubeloom.parallel.state import CubeState


@dataclass(frozen=True)
class FirstToken(Declared):
    """Whole features of each sequence's first token, replicated over x and y."""

    features: int

    def spec(self, name: str, module: nn.Module, seen: Seen) -> FirstTokenSpec:
        return FirstTokenSpec(name=name, features=self.features)


class CubeFirstToken(nn.Module):
    def __init__(self, spec: FirstTokenSpec, state: CubeState) -> None:
        super().__init__()
        self.rows_axis = state.network.axis("y")
        self.cut_rows = state.config.sharded and self.rows_axis.size > 1
        self.features_axis = state.network.axis("x")
        self.origin = spec.name

    def forward(self, rows: Tensor, sequence: int) -> Tensor:
        """`[M/(z·y), H/x]` or `[M/z, H/x]` -> `[sequences/z, H]`."""
        return _FirstToken.apply(rows, sequence, self)


class _FirstToken(torch.autograd.Function):
    """All ranks of x and y compute the same afterwards, so the backward takes this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sequence: int, layer: CubeFirstToken) -> Tensor:
        count = rows.shape[0]
        parts = layer.rows_axis.size if layer.cut_rows else 1
        before = layer.rows_axis.index * count if layer.cut_rows else 0
        # In integers, so that no shape depends on a tensor's values.
        sequences = -(-count * parts // sequence)  # that begin in the rows of all ranks
        here = slice(-(-before // sequence), -(-(before + count) // sequence))  # those that begin in this rank's rows
        local = slice(here.start * sequence - before, count, sequence)
        ctx.shape, ctx.local, ctx.here, ctx.layer = rows.shape, local, here, layer
        block = rows.new_zeros(sequences, rows.shape[1])
        block[here] = rows[local]
        if layer.cut_rows:
            block = layer.rows_axis.all_reduce_in_place(block, f"{layer.origin} forward").wait()
        return layer.features_axis.all_gather(block, 1, f"{layer.origin} forward").wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        axis = ctx.layer.features_axis
        rows = gradient.new_zeros(ctx.shape)
        rows[ctx.local] = gradient.chunk(axis.size, 1)[axis.index][ctx.here]
        return rows, None, None


@make_layer.register
def _(spec: FirstTokenSpec, making: Making) -> nn.Module:
    return CubeFirstToken(spec, making.state)
