"""The pieces that stages consist of: those that a model lists, or the row of blocks found in a model that lists none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.models.pieces import Piece
from cubeloom.parallel import AnyCut, Batch
from cubeloom.parallel.layers.declared import FoundCut
from cubeloom.parallel.specs import LayerSpec
from cubeloom.parallel.traced import Row
from cubeloom.pipeline.runtime.stage_outputs import stage_outputs
from cubeloom.pipeline.volume import RankOutput, StageOutput

Outputs = Sequence[tuple[StageOutput | RankOutput, ...]]


@dataclass(frozen=True)
class ModelPieces:
    """The `modules` of each piece, and the `outputs` that it sends to the next."""

    modules: Sequence[tuple[str, ...]]
    outputs: Outputs
    row: Row | None = None

    @classmethod
    def of(cls, model: nn.Module, cut: AnyCut, grid: Grid, batch: Batch, specs: Sequence[LayerSpec]) -> ModelPieces:
        """Raises UserError if the model has no pieces."""
        if hasattr(model, "pieces"):
            pieces: list[Piece] = model.pieces()  # type: ignore[operator]
            return cls([piece.modules for piece in pieces], stage_outputs(model, specs))
        if not isinstance(cut, FoundCut):
            raise UserError(
                f"{type(model).__name__} does not say its pieces, and has a cut of its own: give it a method `pieces` (see"
                " cubeloom.models.pieces), or leave the cut out, so that it is traced"
            )
        row = cut.row(model, grid, batch)
        passed_on = [row.block_outputs(piece) for piece in range(len(row.pieces) - 1)]
        outputs = [tuple(RankOutput(each.numbers, each.of_samples) for each in some.values()) for some in passed_on]
        return cls(row.modules, [*outputs, ()], row)

    def check(self, model: nn.Module, stages: int) -> None:
        """Raise UserError if there are too few pieces."""
        if self.row is not None and len(self.modules) < stages:
            why = f"; {self.row.why}, so that no stage may begin between" if self.row.why else ""
            raise UserError(
                f"{type(model).__name__} has {len(self.modules)} pieces, and cannot make {stages} stages: what comes before its"
                f" blocks, each block, and what comes behind{why}"
            )
