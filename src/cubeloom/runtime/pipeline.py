"""The runtime: interprets a schedule's actions on this rank's worker.

It knows nothing of Chimera or of any other family: replicas, split backwards, doubled forwards and halved micro-batches are
all in the value that it interprets.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cubeloom.comm import Network
from cubeloom.cube import Batch, Cut, Rest
from cubeloom.cube.apply import Fill
from cubeloom.cube.gradients import Gradients
from cubeloom.cube.loss import CubeCrossEntropy
from cubeloom.models.pieces import Piece
from cubeloom.pipeline import Action, Kind, Schedule, programme
from cubeloom.pipeline.dependencies import Token, makes
from cubeloom.pipeline.messages import Receive, Send, Step
from cubeloom.runtime.build import hold, lay_out
from cubeloom.runtime.channels import Boundary, Channels, Shape
from cubeloom.runtime.microbatches import cut_up, portions, shares
from cubeloom.runtime.stage import Carry, Data, Portion, Stage


class PipelineError(RuntimeError):
    """A step that could not go on: says which rank, at which action, waiting for what, and what it did last."""


class Pipeline:
    """One rank of a pipelined model. `step` trains on one batch; then `parameters` have their gradients.

    `model` is built on the meta device and says its pieces; `batch` is the whole one. `stages` may say which pieces each stage
    gets, otherwise they are balanced. Raises UserError before anything is allocated.
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
        recompute: bool = False,
    ) -> None:
        rest = rest or Rest()
        self.network = network
        self.schedule = schedule
        self.layout = lay_out(model, cut, network.grid, batch, schedule, rest, stages)
        self._here = network.coordinates["pipe"]
        self._held = hold(model, self.layout, network, fill, rest, recompute)
        programmes = programme(schedule)
        self._programme = programmes[self._here]
        self._channels = Channels(network, programmes)
        self._boundaries: dict[int, Boundary] = {}  # of each stage's output
        self._learned = False

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank holds a block of, by name."""
        return self._held.parameters

    @property
    def gradients(self) -> Gradients:
        return self._held.gradients

    def learn(self, data: Mapping[str, Tensor]) -> None:
        """Run every stage once, forward only, to learn what stages hand to one another. The first `step` does it if need be."""
        _Run(self, cut_up(data, portions(self.schedule)), 0).learn_boundaries()
        self._learned = True

    def step(self, data: Mapping[str, Tensor], number: int = 0) -> float:
        """Forward and backward of all micro-batches of this rank's samples; the mean loss of the whole batch.

        `number` of the step, for dropout.
        """
        if not self._learned:
            self.learn(data)
        run = _Run(self, cut_up(data, portions(self.schedule)), number)
        with self.gradients.accumulating():
            for step in self._programme:
                run.do(step)
        self._channels.finish()
        run.reduce(self.parameters)
        self.gradients.finish_reduce()
        return run.total_loss()


class _Run:
    """One step under way."""

    def __init__(self, pipeline: Pipeline, data: dict[Portion, Data], number: int) -> None:
        self._pipeline = pipeline
        self._network = pipeline.network
        self._schedule = pipeline.schedule
        self._here = pipeline._here
        self._held = pipeline._held
        self._channels = pipeline._channels
        self._boundaries = pipeline._boundaries
        self._data = data
        self._made: dict[Token, Carry] = {}  # results on this worker that nobody has taken yet
        self._losses: list[Tensor] = []
        self._reduced: set[nn.Parameter] = set()
        self._finished = "nothing"
        self._first_rows = self._rows_before()
        self._held.clock.step = number
        self._shares = self._loss_shares()

    def do(self, step: Step) -> None:
        try:
            match step:
                case Send(message):
                    self._channels.send(message, self._made.pop(message.token))
                case Receive(message):
                    what, stage, *_ = message.token
                    # The gradient of a stage's input has the shape of the output of the stage before.
                    self._channels.receive(message, self._boundaries[stage if what == "F" else stage - 1])
                case Action():
                    self._act(step)
                    self._finished = str(step)
        except RuntimeError as error:
            place = f"rank {self._network.rank}, worker {self._here}"
            doing = f"{step}" if isinstance(step, Action) else f"{type(step).__name__.lower()} of {step.message}"
            raise PipelineError(f"{place}, at {doing}, after {self._finished}: {error}") from error

    def _act(self, action: Action) -> None:
        portion = action.microbatch, action.part
        stage = self._held.stages[action.replica, action.stage]
        if action.kind is Kind.REDUCE:
            self._reduce_stage(action.stage)
            return
        self._set_clock(stage, portion)
        match action.kind:
            case Kind.FORWARD:
                inputs = self._take(("F", action.stage - 1, *portion)) if action.stage else {}
                self._keep(action, stage.forward(portion, inputs, self._data[portion]))
            case Kind.BACKWARD:
                self._keep(action, stage.backward(portion, self._gradients_into(action)))
            case Kind.INPUT_GRAD:
                self._keep(action, stage.input_grad(portion, self._gradients_into(action)))
            case Kind.WEIGHT_GRAD:
                stage.weight_grad(portion)

    def _keep(self, action: Action, result: Carry) -> None:
        token = makes(action)
        assert token is not None
        if action.kind is Kind.FORWARD and action.stage == self._schedule.stages - 1:
            self._losses.append(result["loss"])
        elif action.kind is Kind.FORWARD or action.stage:
            self._made[token] = result

    def _gradients_into(self, action: Action) -> Carry:
        """The gradients of the stage's output; the last stage has a loss, and needs none."""
        if action.stage == self._schedule.stages - 1:
            return {}
        return self._take(("I", action.stage + 1, action.microbatch, action.part))

    def _take(self, token: Token) -> Carry:
        """What was made on this worker, or comes from another."""
        return self._made.pop(token) if token in self._made else self._channels.take(token)

    def _reduce_stage(self, stage: int) -> None:
        """Start to sum the gradients of a stage, but for a weight that another stage of this worker still adds to."""
        done = {form.name for form in self._pipeline.layout.forms_of(stage)}
        shared = {
            name for replica, other in self._held.stages if other != stage for name in self._names(replica, other)
        }
        mine = {name: each for name, each in self._pipeline.parameters.items() if name.rpartition(".")[0] in done}
        self.reduce({name: each for name, each in mine.items() if name not in shared})

    def _names(self, replica: int, stage: int) -> list[str]:
        return [name for name, _ in self._held.models[replica, stage].named_parameters()]

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Start to sum the gradients of those that have not been started."""
        new = [parameter for parameter in parameters.values() if parameter not in self._reduced]
        self._reduced.update(new)
        self._pipeline.gradients.start_reduce(new)

    def total_loss(self) -> float:
        """The mean loss of the whole batch, on every rank."""
        mine = torch.stack(self._losses).double().sum() if self._losses else torch.zeros((), dtype=torch.float64)
        return self._network.axis("pipe").all_reduce(mine.to(self._network.device), "loss").wait().item()

    def learn_boundaries(self) -> None:
        """Run every stage once, forward and without a graph, for the shapes of what it hands on."""
        data = next(iter(self._data.values()))
        for replica, row in enumerate(self._schedule.placement):
            carry: Carry = {}
            for stage, worker in enumerate(row):
                if worker != self._here:
                    continue
                if stage and row[stage - 1] != worker:
                    carry = self._empty(self._channels.hear((row[stage - 1], worker)), stage - 1)
                held = self._held.stages[replica, stage]
                self._set_clock(held, next(iter(self._data)))
                carry = held.dry_run(carry, data)
                if stage + 1 < len(row):
                    self._boundaries[stage] = {name: Shape.of(tensor) for name, tensor in carry.items()}
                    if row[stage + 1] != worker:
                        self._channels.tell((worker, row[stage + 1]), self._boundaries[stage])

    def _empty(self, boundary: Boundary, stage: int) -> Carry:
        self._boundaries[stage] = boundary
        device = self._network.device
        return {name: torch.zeros(shape.size, dtype=shape.dtype, device=device) for name, shape in boundary.items()}

    def _set_clock(self, stage: Stage, portion: Portion) -> None:
        self._held.clock.first_row, self._held.clock.rows = self._first_rows[portion]
        stage.state.shares.update(self._shares.get(portion, {}))

    def _rows_before(self) -> dict[Portion, tuple[int, int]]:
        """For each portion the rows of this z rank that come before it, and all of them."""
        sizes = {portion: data["tokens"].numel() for portion, data in self._data.items()}
        total = sum(sizes.values())
        found, before = {}, 0
        for portion, size in sizes.items():
            found[portion] = (before, total)
            before += size
        return found

    def _loss_shares(self) -> dict[Portion, dict[str, float]]:
        last = [home for home in self._held.stages if home[1] == self._schedule.stages - 1]
        if not last:
            return {}
        model = self._held.models[last[0]]
        pieces: list[Piece] = model.pieces()  # type: ignore[operator]
        losses = pieces[-1].losses
        layers = {name: model.get_submodule(name) for name in losses if hasattr(model, name)}
        found = {name: layer for name, layer in layers.items() if isinstance(layer, CubeCrossEntropy)}
        return shares(self._data, {name: losses[name] for name in found}, found, self._network)
