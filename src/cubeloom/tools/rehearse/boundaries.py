"""Finds the tensors that each stage sends to the next, without other workers: all pieces run here, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cubeloom.comm import Network
from cubeloom.comm.recording_backend import rehearsed
from cubeloom.models.pieces import Carry, Piece
from cubeloom.parallel import Batch, apply
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.traced import Row
from cubeloom.pipeline import Schedule
from cubeloom.pipeline.runtime.channels import Boundary, Shape, together
from cubeloom.pipeline.runtime.microbatches import cut_up, portions
from cubeloom.pipeline.runtime.row_stage import RowStage
from cubeloom.pipeline.runtime.stage import Data
from cubeloom.tools.rehearse.program import empty_values
from cubeloom.tools.rehearse.without_values import without_values
from cubeloom.tools.verify import Experiment
from cubeloom.tools.verify.live import Known


def boundaries(experiment: Experiment, schedule: Schedule) -> Known:
    """The shapes are the same on every rank: the tensors are cut over the cube into equal parts."""
    layout = experiment.layout(schedule)
    stages = layout.stages
    grid = replace(experiment.grid, pipe=1)
    cut = portions(schedule)
    with rehearsed(0, grid.world):
        network = Network(grid)
        with without_values(), torch.no_grad():
            one = Batch(experiment.batch.samples // len(cut) // experiment.ways, experiment.batch.sequence)
            fill = empty_values(experiment.dtype, network.device)
            data = cut_up(experiment.share(0, network.coordinates), cut)[cut[0]]
            if layout.row is not None:
                return _of_row(experiment, layout.row, stages[:-1], network, one, fill, data)
            model = experiment.skeleton()
            apply(model, experiment.cut(model), network, one, fill, experiment.rest).clock.step = 0
            pieces: list[Piece] = model.pieces()  # type: ignore[operator]
            carry: Carry = {}
            found = {}
            for stage, numbers in enumerate(stages[:-1]):
                for number in numbers:
                    carry = pieces[number].run(carry, data)
                found[stage] = {name: Shape.of(tensor) for name, tensor in carry.items()}
    return found


def _of_row(
    experiment: Experiment,
    row: Row,
    stages: Sequence[range],
    network: Network,
    batch: Batch,
    fill: Fill,
    data: Data,
) -> Known:
    """For a model that does not list its pieces: each stage runs the forward with its own modules."""
    carry: Carry = {}
    before: Boundary = {}
    found = {}
    for stage, pieces in enumerate(stages):
        model = experiment.skeleton()
        state = apply(model, experiment.cut(model), network, batch, fill, experiment.rest)
        here = RowStage(model, row, pieces, state)
        here.told(before)
        carry = here.run(carry, data)
        before = here.seen
        found[stage] = together({name: Shape.of(tensor) for name, tensor in carry.items()}, before)
    return found
