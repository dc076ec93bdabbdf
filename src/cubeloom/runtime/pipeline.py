"""A pipelined model on one rank: built from a schedule, trained step by step."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from cubeloom.comm import Network
from cubeloom.cube import Batch, Cut, Rest
from cubeloom.cube.apply import Fill
from cubeloom.cube.gradients import Gradients
from cubeloom.errors import UserError
from cubeloom.pipeline import Schedule, Updates, programme
from cubeloom.runtime.build import hold, lay_out
from cubeloom.runtime.channels import Boundary, Channels, Shape
from cubeloom.runtime.interpreter import Interpreter
from cubeloom.runtime.microbatches import cut_up, portions
from cubeloom.runtime.stage import Carry
from cubeloom.runtime.work import StepWork, Update


class Pipeline:
    """One rank of a pipelined model. `step` trains on one batch; then `parameters` have their gradients.

    `model` is built on the meta device and says its pieces; `batch` is the whole one. `stages` may say which pieces each stage
    gets, otherwise they are balanced; `recompute` says which stages, or whether all, compute their forward once more in their
    backward instead of keeping it; each micro-batch runs as `ways` strands. Raises UserError before anything is allocated.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        network: Network,
        batch: Batch,
        fill: Fill,
        schedule: Schedule,
        rest: Rest | None = None,
        stages: list[range] | None = None,
        recompute: bool | Collection[int] = False,
        ways: int = 1,
    ) -> None:
        rest = rest or Rest()
        self.network = network
        self.schedule = schedule
        self.layout = lay_out(model, cut, network.grid, batch, schedule, rest, stages, ways)
        self._here = network.coordinates["pipe"]
        self._held = hold(model, self.layout, network, fill, rest, recompute, ways)
        self._channels = Channels(network, programme(schedule))
        self._boundaries: dict[int, Boundary] = {}  # of each stage's output

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds a block of, by name."""
        return self._held.parameters

    @property
    def gradients(self) -> Gradients:
        return self._held.gradients

    def step(self, data: Mapping[str, Tensor], number: int = 0, update: Update | None = None) -> float:
        """Forward and backward of all micro-batches of this rank's samples; the mean loss of the whole batch.

        `number` of the step, for dropout. A schedule that updates weights within the step calls `update` where it does:
        that lets an optimizer step on the parameters, and clears their gradients.
        """
        if (self.schedule.updates is Updates.FLUSH) is not (update is None):
            raise UserError(
                f"{self.schedule.name} updates weights {'after' if update else 'within'} a step: "
                f"step() {'takes no update' if update else 'needs to be given an update'}"
            )
        if not self._boundaries:
            self.learn(data)
        work = self._work(data, number, update)
        where = f"rank {self.network.rank}, worker {self._here}"
        stages, watch = self.schedule.stages, self.network.watch
        with self.gradients.accumulating():
            Interpreter(work, self._channels, self._boundaries, stages, where, watch).run(self._channels.steps)
        return work.finish()

    def learn(self, data: Mapping[str, Tensor]) -> None:
        """Run every stage once, forward only, to learn what stages hand to one another. The first `step` does it if need be."""
        work = self._work(data, 0, None)
        portion = portions(self.schedule)[0]
        for replica, row in enumerate(self.schedule.placement):
            carry: Carry = {}
            for stage, worker in enumerate(row):
                if worker != self._here:
                    continue
                if stage and row[stage - 1] != worker:
                    self._boundaries[stage - 1] = self._channels.hear((row[stage - 1], worker))
                    carry = self._empty(self._boundaries[stage - 1])
                carry = work.stage_for(replica, stage, portion).dry_run(carry, work.data[portion])
                if stage + 1 < len(row):
                    self._boundaries[stage] = {name: Shape.of(tensor) for name, tensor in carry.items()}
                    if row[stage + 1] != worker:
                        self._channels.tell((worker, row[stage + 1]), self._boundaries[stage])

    def _work(self, data: Mapping[str, Tensor], number: int, update: Update | None) -> StepWork:
        return StepWork(self.layout, self._held, self.network, cut_up(data, portions(self.schedule)), number, update)

    def _empty(self, boundary: Boundary) -> Carry:
        device = self.network.device
        return {name: torch.zeros(shape.size, dtype=shape.dtype, device=device) for name, shape in boundary.items()}
