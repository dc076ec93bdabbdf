"""What each stage of a pipeline hands to the next, found without the other workers: all pieces run here, one after another."""

from __future__ import annotations

from dataclasses import replace

import torch

from cubeloom.comm import Network
from cubeloom.comm.recording_backend import rehearsed
from cubeloom.models.pieces import Carry, Piece
from cubeloom.parallel import Batch, apply
from cubeloom.pipeline import Schedule
from cubeloom.pipeline.runtime.channels import Shape
from cubeloom.pipeline.runtime.microbatches import cut_up, portions
from cubeloom.tools.rehearse.program import empty_values
from cubeloom.tools.rehearse.without_values import without_values
from cubeloom.tools.verify import Experiment
from cubeloom.tools.verify.live import Known


def boundaries(experiment: Experiment, schedule: Schedule) -> Known:
    """The shapes are the same on every rank: a carry is cut over the cube, and all parts are equal."""
    stages = experiment.layout(schedule).stages
    grid = replace(experiment.grid, pipe=1)
    cut = portions(schedule)
    with rehearsed(0, grid.world):
        network = Network(grid)
        with without_values(), torch.no_grad():
            model = experiment.skeleton()
            one = Batch(experiment.batch.samples // len(cut) // experiment.ways, experiment.batch.sequence)
            fill = empty_values(experiment.dtype, network.device)
            apply(model, experiment.cut(model), network, one, fill, experiment.rest).clock.step = 0
            data = cut_up(experiment.share(0, network.coordinates), cut)[cut[0]]
            pieces: list[Piece] = model.pieces()  # type: ignore[operator]
            carry: Carry = {}
            found = {}
            for stage, numbers in enumerate(stages[:-1]):
                for number in numbers:
                    carry = pieces[number].run(carry, data)
                found[stage] = {name: Shape.of(tensor) for name, tensor in carry.items()}
    return found
