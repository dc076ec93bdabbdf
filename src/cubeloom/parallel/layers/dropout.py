"""Dropout of the residual stream, with a mask that depends on seed, step, layer and position, not on the grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cubeloom.base import counter
from cubeloom.base.errors import UserError
from cubeloom.parallel import weave
from cubeloom.parallel.layers.declared import Declared, Making, Seen, make_layer
from cubeloom.parallel.specs import DropoutSpec
from cubeloom.parallel.state import CubeState


@dataclass(frozen=True)
class Dropout(Declared):
    """Dropout of the residual stream, with a mask that depends only on seed, step and position."""

    def spec(self, name: str, module: nn.Module, seen: Seen) -> DropoutSpec | None:
        return DropoutSpec(name=name, probability=module.p) if isinstance(module, nn.Dropout) else None


class CubeDropout(nn.Module):
    """Drops elements of `[rows, H/x]`. Rows are cut by data and z, and by y if activations are sharded.

    A recomputed block computes the same mask again.
    """

    def __init__(self, spec: DropoutSpec, state: CubeState) -> None:
        super().__init__()
        network = state.network
        self.p = spec.probability
        self._name = spec.name
        self._clock = state.clock
        self._columns = network.axis("x")
        self._part = network.coordinates["data"] * network.grid.z + network.coordinates["z"]
        cut_rows = bool(state.config.sharded)
        self._woven = False
        self._within = (network.coordinates["y"], network.grid.y) if cut_rows else (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self._clock.step is None:
            raise UserError(
                f"layer {self._name}: dropout draws a new mask each step, and nobody has said which step this is; "
                "set `state.clock.step`, of what `apply` returned, before each"
            )
        rows, columns = x.shape
        place, parts = self._within
        strand, ways = weave.place()
        self._woven |= ways > 1
        weave.refuse_to_guess(self._name, self._woven)
        own = parts * rows  # rows of this strand on this z rank
        before = self._part * (self._clock.rows or ways * own) + self._clock.first_row + strand * own
        first_row = before + place * rows
        row = torch.arange(first_row, first_row + rows, device=x.device)
        column = torch.arange(columns, device=x.device) + self._columns.index * columns
        index = row[:, None] * (columns * self._columns.size) + column
        key = counter.key(self._clock.seed, self._clock.step, self._name)
        kept = counter.uniform(key, index) >= self.p
        return x * kept / (1 - self.p)


@make_layer.register
def _(spec: DropoutSpec, making: Making) -> nn.Module:
    return CubeDropout(spec, making.state)
