"""A pipelined model on one rank: built from a schedule, trained step by step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.parallel import AnyCut, Batch, CubeState, ShardingPolicy
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.fp8 import AmaxHistory
from cubeloom.parallel.gradients import Gradients
from cubeloom.parallel.layers.declared import FoundCut
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.specs import parameters
from cubeloom.pipeline import Schedule, Updates, forwards
from cubeloom.pipeline.runtime.build import Recompute, hold, plan_stages
from cubeloom.pipeline.runtime.channels import Boundary, Channels, Shape, apart, together
from cubeloom.pipeline.runtime.interpreter import Interpreter, Observer, Work
from cubeloom.pipeline.runtime.microbatches import cut_up, portions
from cubeloom.pipeline.runtime.recorded import Record, RecordedSteps, check_recordable
from cubeloom.pipeline.runtime.stage import Carry, Portion
from cubeloom.pipeline.runtime.work import EvaluationWork, StepWork, Update


class Pipeline:
    """One rank of a pipelined model. `step` trains on one batch; then `parameters` have their gradients.

    `model` is on the meta device and lists its pieces; `batch` is the whole batch. `stages`: the pieces of each stage,
    by default balanced. `recompute`: the stages that recompute their forward in their backward, or all, or attention
    alone. `ways`: strands of each micro-batch. `compile`: torch compiles the code between collectives. `record` records
    stages' actions (`GraphRecord()` on a GPU). `seed` determines the masks of dropout. `unchecked`: see `resolve`. Raises
    UserError before anything is allocated.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: AnyCut,
        network: Network,
        batch: Batch,
        fill: Fill,
        schedule: Schedule,
        rest: ShardingPolicy | None = None,
        stages: list[range] | None = None,
        recompute: Recompute = False,
        ways: int = 1,
        compile: bool = False,
        record: Record | None = None,
        seed: int = 0,
        unchecked: bool = False,
    ) -> None:
        rest = rest or ShardingPolicy()
        self.network = network
        self.schedule = schedule
        self.ways = ways
        self.layout = plan_stages(model, cut, network.grid, batch, schedule, rest, stages, ways, unchecked=unchecked)
        self.layout.check_options(recompute)
        if record is not None:
            check_recordable(self.layout.specs, schedule, ways, bool(recompute))
        self._here = network.coordinates["pipe"]
        part = Batch(batch.samples // (len(portions(schedule)) * ways), batch.sequence)

        def finish(of_stage: nn.Module, state: CubeState, fill: Fill) -> None:
            if isinstance(cut, FoundCut):
                cut.finish(of_stage, network.grid, part, state, fill, compile)

        held = self._held = hold(
            model, self.layout, network, fill, rest, recompute, ways, compile, record, seed, finish
        )
        self._recorded: RecordedSteps | None = None
        if record is not None:
            once = len(portions(schedule)) == 1
            self._recorded = RecordedSteps(
                held.stages.values(), held.parameters.values(), held.gradients, held.amax, once=once
            )
        self._channels = Channels(network, schedule)
        self._boundaries: dict[int, Boundary] = {}  # of each stage's output
        # What a checked model uses: a stage that left out a part would train something else.
        config = ParallelConfig.exact(network.grid, rest, Batch(1, 1), item=1)
        found = self.layout.specs if isinstance(cut, FoundCut) else ()
        self._trained = {each.name for spec in found for each in parameters(spec, config).values() if each.trained}
        self._learned = False  # whether they are known; a single stage sends nothing

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of which this rank has a block, by name."""
        return self._held.parameters

    @property
    def models(self) -> list[tuple[int, nn.Module]]:
        """The model pruned to each stage of this rank, with the stage's number."""
        return [(stage, model) for (_, stage), model in self._held.models.items()]

    @property
    def gradients(self) -> Gradients:
        return self._held.gradients

    @property
    def amax(self) -> AmaxHistory | None:
        """What FP8 remembers of earlier steps, the same on all ranks."""
        return self._held.amax

    def step(
        self,
        data: Mapping[str, Tensor],
        number: int = 0,
        update: Update | None = None,
        observer: Observer | None = None,
    ) -> float:
        """Run forward and backward of all micro-batches of this rank's samples; return the mean loss of the whole
        batch.

        `number` of the step, for dropout. A schedule that updates weights within the step calls `update` at each
        update: it runs an optimizer step and clears the gradients. `observer` is told of every action.
        """
        return self.launch(data, number, update, observer).item()

    def launch(
        self,
        data: Mapping[str, Tensor],
        number: int = 0,
        update: Update | None = None,
        observer: Observer | None = None,
    ) -> Tensor:
        """As `step`, but the loss stays on the device: on a GPU everything is launched and the host has not waited."""
        if (self.schedule.updates is Updates.FLUSH) is not (update is None):
            raise UserError(
                f"{self.schedule.name} updates weights {'after' if update else 'within'} a step: "
                f"step() {'takes no update' if update else 'needs to be given an update'}"
            )
        if not self._learned:
            self.learn(data)
        work = self._work(data, number, update)
        with self.gradients.accumulating(once=len(portions(self.schedule)) * self.ways == 1):
            if self._recorded is not None:
                self._recorded.begin()
            self._run(work, self._channels, observer)
        return work.finish()

    def evaluate(self, data: Mapping[str, Tensor]) -> float:
        """The mean loss of the whole batch, from forwards without dropout; nothing is kept for a backward."""
        if not self._learned:
            self.learn(data)
        work = EvaluationWork(self.layout, self._held, self.network, cut_up(data, portions(self.schedule)), 0)
        for model in self._held.models.values():
            model.eval()
        with torch.no_grad():
            self._run(work, self._forwards)
        for model in self._held.models.values():
            model.train()
        return work.loss().item()

    @cached_property
    def _forwards(self) -> Channels:
        """Channels for the forwards only. All ranks create them at the first evaluation."""
        return Channels(self.network, forwards(self.schedule), existing=self._channels)

    def _run(self, work: Work, channels: Channels, observer: Observer | None = None) -> None:
        where = f"rank {self.network.rank}, worker {self._here}"
        observers = [each for each in (self.network.watch, observer) if each is not None]
        Interpreter(work, channels, self._boundaries, self.schedule.stages, where, observers).run(channels.steps)

    def learn(self, data: Mapping[str, Tensor], known: Mapping[int, Boundary] | None = None) -> None:
        """Run every stage's forward once, to learn which tensors stages send and which parameters they use.

        The first `step` calls this if needed. `known`: the tensors that each stage sends, in a rehearsal, whose network
        transfers nothing.
        """
        for stage in self._held.stages.values():
            stage.forget()
        work = self._work(data, 0, None)
        portion = portions(self.schedule)[0]
        with self.gradients.seen_in_forward() as used:
            self._run_each_stage(work, portion, known)
        names = [used] if self.network.rehearsed else self.network.host_group.gather(used)
        everywhere = set[str]().union(*names)
        places = [self.network.grid.coordinates(rank)["pipe"] for rank in range(len(names))]
        self._held.alike = len({(place, frozenset(each)) for place, each in zip(places, names, strict=True)}) == len(
            set(places)
        )
        self.gradients.expect(everywhere)
        if missing := sorted(self._trained - everywhere) if not self.network.rehearsed else []:
            raise UserError(
                f"no stage uses {missing[0]} (and {len(missing) - 1} more like it), which the model uses where it is whole: it"
                " cannot be cut into stages; use pipe=1"
            )
        self._learned = True

    def _run_each_stage(self, work: StepWork, portion: Portion, known: Mapping[int, Boundary] | None) -> None:
        for replica, row in enumerate(self.schedule.placement):
            carry: Carry = {}
            before: Boundary = {}  # outputs of earlier stages, besides what is sent
            for stage, worker in enumerate(row):
                if worker != self._here:
                    continue
                here = work.stage_for(replica, stage, portion)
                if stage and row[stage - 1] != worker:
                    edge = row[stage - 1], worker
                    told = self._channels.hear(edge, known[stage - 1] if known else None)
                    self._boundaries[stage - 1], before = apart(told)
                    carry = self._empty(self._boundaries[stage - 1])
                here.told(before)
                carry = here.dry_run(carry, work.data[portion])
                before = here.seen
                if stage + 1 < len(row):
                    self._boundaries[stage] = {name: Shape.of(tensor) for name, tensor in carry.items()}
                    if row[stage + 1] != worker:
                        self._channels.tell((worker, row[stage + 1]), together(self._boundaries[stage], before))

    def _work(self, data: Mapping[str, Tensor], number: int, update: Update | None) -> StepWork:
        return StepWork(self.layout, self._held, self.network, cut_up(data, portions(self.schedule)), number, update)

    def _empty(self, boundary: Boundary) -> Carry:
        device = self.network.device
        return {name: torch.zeros(shape.size, dtype=shape.dtype, device=device) for name, shape in boundary.items()}
