"""Computes the actions of one step on a worker with stages of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from cubeloom.comm import Network
from cubeloom.models.pieces import Piece
from cubeloom.parallel.layers.edges import CubeSquaredLoss
from cubeloom.parallel.layers.loss import CubeCrossEntropy
from cubeloom.pipeline import Action, Kind, Updates
from cubeloom.pipeline.memory import versions
from cubeloom.pipeline.runtime.build import LocalStages, StagePlan
from cubeloom.pipeline.runtime.microbatches import counted_shares, shares
from cubeloom.pipeline.runtime.stage import Carry, Data, Portion, Stage
from cubeloom.pipeline.runtime.versions import Versions

Update = Callable[[], None]  # runs an optimizer step and clears the gradients


class StepWork:
    """`data`: this rank's samples by portion. `update`: for schedules that update within a step."""

    def __init__(
        self,
        layout: StagePlan,
        held: LocalStages,
        network: Network,
        data: Mapping[Portion, Data],
        number: int,
        update: Update | None = None,
    ) -> None:
        self._layout = layout
        self._schedule = layout.schedule
        self._held = held
        self._network = network
        self.data = data
        self._update = update
        self._versions = self._find_versions() if update is not None else None
        self._losses: list[Tensor] = []
        self._reduced: set[nn.Parameter] = set()
        self._final = self._last_actions()
        self._first_rows = self._rows_before()
        self._shares = self._loss_shares()
        held.clock.step = number

    def forward(self, action: Action, inputs: Carry) -> Carry:
        portion = action.microbatch, action.part
        stage = self.stage_for(action.replica, action.stage, portion)
        with self._weights(action):
            outputs = stage.forward(portion, inputs, self.data[portion])
        if action.stage == self._schedule.stages - 1:
            self._losses.append(outputs["loss"])
        return outputs

    def backward(self, action: Action, gradients: Carry) -> Carry:
        portion = action.microbatch, action.part
        stage = self.stage_for(action.replica, action.stage, portion)
        if action.kind is Kind.INPUT_GRAD:
            return stage.input_grad(portion, gradients)
        with self._weights(action), self._reducing(action):
            found = stage.backward(portion, gradients)
        if self._versions is not None:
            self._versions.backward_done(action.microbatch)
        return found

    def other(self, action: Action) -> None:
        match action.kind:
            case Kind.WEIGHT_GRAD:
                with self._reducing(action):
                    self._held.stages[action.replica, action.stage].weight_grad((action.microbatch, action.part))
            case Kind.REDUCE:
                self._reduce(self._parameters_of(action.stage))
            case Kind.UPDATE:
                assert self._update is not None and self._versions is not None
                self._held.gradients.start_reduce(self._held.parameters.values())
                self._held.gradients.finish_reduce()
                self._versions.update(self._update)

    def finish(self) -> Tensor:
        """Reduce the remaining gradients; return the mean loss."""
        if self._versions is None:
            self._reduce(self._held.parameters.values())
            self._held.gradients.finish_reduce()
        return self.loss()

    def loss(self) -> Tensor:
        """The mean loss of the whole batch, on every rank."""
        groups = 1 + self._schedule.groups[-1]
        nothing = torch.zeros((), dtype=torch.float64, device=self._network.device)
        mine = torch.stack(self._losses).double().sum() if self._losses else nothing
        if self._losses and self._layout.row is not None:
            # A loss that is not a cross-entropy is a mean over the rank's own samples.
            everybody = self._network.axis("data", "z")
            mine = everybody.all_reduce(mine, "loss").wait() / everybody.size
        return self._network.axis("pipe").all_reduce(mine, "loss").wait() / groups

    def stage_for(self, replica: int, stage: int, portion: Portion) -> Stage:
        """A stage, prepared for a portion."""
        found = self._held.stages[replica, stage]
        self._held.clock.first_row, self._held.clock.rows = self._first_rows[portion]
        found.state.shares.update(self._shares.get(portion, {}))
        return found

    def _weights(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self._versions is None else self._versions.of(action.microbatch)

    def _find_versions(self) -> Versions:
        assert self._schedule.updates is not Updates.FLUSH
        used = versions(self._schedule, self._network.coordinates["pipe"])
        # One stage per worker: `plan_stages` checked it.
        by_microbatch = {microbatch: version for (_, _, microbatch), version in used.items()}
        return Versions(list(self._held.parameters.values()), by_microbatch)

    def _last_actions(self) -> set[Action]:
        """Actions that make a stage's last gradients and that its reduction follows."""
        row = self._schedule.workers[self._network.coordinates["pipe"]]
        pairs = ((before, action) for before, action in pairwise(row) if action.kind is Kind.REDUCE)
        return {
            before
            for before, action in pairs
            if before.makes_weight_grad and (before.replica, before.stage) == (action.replica, action.stage)
        }

    def _reducing(self, action: Action) -> AbstractContextManager[None]:
        """Of a stage's last gradients each is reduced as soon as it is complete, behind the rest of the action."""
        if action not in self._final or not self._held.alike:
            return nullcontext()
        own = self._parameters_of(action.stage)
        self._reduced.update(own)
        return self._held.gradients.reducing(own)

    def _parameters_of(self, stage: int) -> list[nn.Parameter]:
        """Those of a stage, except a weight that another stage of this worker still adds to."""
        done = {spec.name for spec in self._layout.specs_of(stage)}
        others = [model for (_, other), model in self._held.models.items() if other != stage]
        shared = {id(each) for model in others for each in model.parameters()}
        mine = [each for name, each in self._held.parameters.items() if name.rpartition(".")[0] in done]
        return [each for each in mine if id(each) not in shared]

    def _reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start to reduce the gradients of those that are not started yet."""
        new = [parameter for parameter in parameters if parameter not in self._reduced]
        self._reduced.update(new)
        self._held.gradients.start_reduce(new)

    def _rows_before(self) -> dict[Portion, tuple[int, int]]:
        """For each portion, the number of this z rank's rows before it, and of all its rows."""
        # Rows are tokens. A model on images has no dropout by rows, so its samples serve as rows.
        sizes = {portion: _rows_of(data) for portion, data in self.data.items()}
        total = sum(sizes.values())
        found, before = {}, 0
        for portion, size in sizes.items():
            found[portion] = (before, total)
            before += size
        return found

    def _loss_shares(self) -> dict[Portion, dict[str, Tensor]]:
        last = [home for home in self._held.stages if home[1] == self._schedule.stages - 1]
        if not last:
            return {}
        model = self._held.models[last[0]]
        row = self._held.stages[last[0]].row
        if row is not None:
            known = bool(row.seen)  # not while the pipeline learns which tensors stages send
            return counted_shares(self.data, self._schedule.groups, row.count, self._network) if known else {}
        pieces: list[Piece] = model.pieces()  # type: ignore[operator]
        losses = pieces[-1].losses
        layers = {name: model.get_submodule(name) for name in losses if hasattr(model, name)}
        found = {name: layer for name, layer in layers.items() if isinstance(layer, CubeCrossEntropy | CubeSquaredLoss)}
        return shares(self.data, self._schedule.groups, {name: losses[name] for name in found}, found, self._network)


def _rows_of(data: Data) -> int:
    first = next(each for each in data.values() if isinstance(each, Tensor) and each.dim())
    return prod(first.shape[:2])


class EvaluationWork(StepWork):
    """Forwards only; nothing is kept for a backward."""

    def forward(self, action: Action, inputs: Carry) -> Carry:
        portion = action.microbatch, action.part
        outputs = self.stage_for(action.replica, action.stage, portion).dry_run(inputs, self.data[portion])
        if action.stage == self._schedule.stages - 1:
            self._losses.append(outputs["loss"])
        return outputs
