"""Replaces a cut: the model is traced for the requested grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.grid import Grid
from cubeloom.parallel.config import Batch
from cubeloom.parallel.cut import CutError
from cubeloom.parallel.layers.declared import FoundCut
from cubeloom.parallel.outputs import Outputs
from cubeloom.parallel.parameter import Block
from cubeloom.parallel.specs import LayerSpec
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.traced.model import Traced, trace
from cubeloom.parallel.traced.row import Row
from cubeloom.parallel.traced.styles import Plan

_SAMPLES = 4  # of the example: what holds for two samples on a rank holds for more


@dataclass(frozen=True)
class Tracing(FoundCut):
    """`example`: from a batch to the keyword arguments of its forward. `plan`: the user's, for some layers."""

    example: Callable[[Batch], Mapping[str, Any]]
    plan: Plan | None = None
    _found: dict[tuple[Grid, int], Traced] = field(default_factory=dict, compare=False, repr=False)

    def traced(self, model: nn.Module, grid: Grid, batch: Batch) -> Traced:
        """The layouts of the layers on this grid. Raises CutError if data and z do not divide the batch."""
        parts = grid.data * grid.z
        if batch.samples % parts:
            below = batch.samples // parts * parts
            near = " or ".join(f"{samples}" for samples in (below, below + parts) if samples)
            raise CutError(
                f"grid {grid}: the batch of {batch.samples} samples cannot be cut over data={grid.data}·z={grid.z}; the nearest"
                f" batches that work: {near} samples"
            )
        key = grid, batch.sequence
        if key not in self._found:
            with torch_private.real_tensors():  # also in a rehearsal, whose tensors have no values
                self._found[key] = trace(model, grid, self.example(Batch(_SAMPLES, batch.sequence)), plan=self.plan)
        return self._found[key]

    def specs(self, model: nn.Module, grid: Grid, batch: Batch) -> list[LayerSpec]:
        return list(self.traced(model, grid, batch).specs)

    def outputs(self, model: nn.Module, grid: Grid, batch: Batch) -> Outputs:
        return self.traced(model, grid, batch).outputs

    def row(self, model: nn.Module, grid: Grid, batch: Batch) -> Row:
        return self.traced(model, grid, batch).row(model)

    def finish(
        self,
        model: nn.Module,
        grid: Grid,
        batch: Batch,
        state: CubeState,
        fill: Callable[[str, Block], Tensor],
        compile: bool = False,
    ) -> None:
        self.traced(model, grid, batch).finish(model, state, fill, compile)
