"""The program of one rank: its part of the model, its optimizer, some steps. The same on a live job and in a rehearsal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from cubeloom.comm import Ledger, Network, devices
from cubeloom.cube import Batch, apply
from cubeloom.cube.apply import Fill
from cubeloom.cube.parameter import local_of
from cubeloom.rehearse.memory import Memory, Tracker
from cubeloom.runtime import Pipeline
from cubeloom.runtime.channels import Boundary
from cubeloom.train import BlockOptimizer, ShardedOptimizer
from cubeloom.verify import Experiment
from cubeloom.verify.runs import Train, adamw, fill_of, plainly
from cubeloom.weave import Weave

# What each stage hands to the next, where the network cannot tell.
Known = Mapping[int, Boundary]


@dataclass
class Job:
    """A rank that is ready to train. `step` is forward and backward; `update` follows, unless the step has it inside."""

    experiment: Experiment
    network: Network
    step: Train
    parameters: dict[str, nn.Parameter]
    optimizer: BlockOptimizer | ShardedOptimizer

    def data(self, number: int) -> dict[str, Tensor]:
        samples = self.experiment.share(number, self.network.coordinates)
        return {name: tensor.to(self.network.device) for name, tensor in samples.items()}

    def train(self, data: Mapping[str, Tensor], number: int, after_backward: Callable[[], None]) -> None:
        self.step(dict(data), number)
        after_backward()
        if not self.experiment.asynchronous:
            self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> Iterator[Tensor]:
        """Those that are there: of a parameter, or of the part that this rank updates."""
        for parameter, part in self.optimizer.parts.items():
            if parameter.grad is not None:
                yield local_of(parameter.grad)
            if part.tensor.grad is not None:
                yield part.tensor.grad

    def optimizer_state(self) -> Iterator[Tensor]:
        """Moments and the like, and masters of weights of few digits."""
        yield from (part.tensor for part in self.optimizer.parts.values() if part.master)
        for state in self.optimizer.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def build(experiment: Experiment, network: Network, fill: Fill, known: Known | None = None) -> Job:
    """`known` takes the place of what workers tell one another before the first step."""
    model = experiment.skeleton()
    make = partial(adamw, experiment=experiment)
    step: Train
    if experiment.schedule is None:
        strand = Batch(experiment.batch.samples // experiment.ways, experiment.batch.sequence)
        state = apply(model, experiment.cut(), network, strand, fill, experiment.rest)
        step, gradients = plainly(Weave(model, experiment.ways, state.staggers), state), state.gradients
        parameters = dict(model.named_parameters())
    else:
        pipeline = Pipeline(
            model,
            experiment.cut(),
            network,
            experiment.batch,
            fill,
            experiment.schedule,
            experiment.rest,
            recompute=experiment.recompute,
            ways=experiment.ways,
        )
        first = experiment.share(0, network.coordinates)
        pipeline.learn({name: tensor.to(network.device) for name, tensor in first.items()}, known)
        step, parameters, gradients = pipeline.step, pipeline.parameters, pipeline.gradients
    optimizer: BlockOptimizer | ShardedOptimizer = (
        ShardedOptimizer(parameters.values(), gradients, make)
        if experiment.zero
        else BlockOptimizer(parameters.values(), make)
    )
    job = Job(experiment, network, step, parameters, optimizer)
    if experiment.asynchronous:
        job.step = partial(pipeline.step, update=job.update)
    return job


@dataclass(frozen=True)
class Seen:
    """What one rank saw: its last step's communication, its memory over all steps."""

    ledger: Ledger
    memory: Memory


def watch(job: Job, tracker: Tracker, ledger: Ledger) -> Seen:
    """Train, with the tracker and the ledger on."""
    tracker.label("parameters", map(local_of, job.parameters.values()))
    tracker.label("optimizer", job.optimizer_state())
    for parameter in job.parameters.values():
        # Of an optimizer whose state is sharded, gradients are gone by the end of the backward.
        parameter.register_post_accumulate_grad_hook(partial(_label_gradient, tracker))
    tracker.begin()
    mark = 0
    for number in range(job.experiment.steps):
        mark = len(ledger.entries)
        data = job.data(number)
        tracker.label("buffers", data.values())
        job.train(data, number, lambda: tracker.label("gradients", job.gradients()))
        tracker.label("optimizer", job.optimizer_state())
    return Seen(Ledger(ledger.entries[mark:]), tracker.memory())


def _label_gradient(tracker: Tracker, parameter: Tensor) -> None:
    if parameter.grad is not None:
        tracker.label("gradients", [local_of(parameter.grad)])


def compute_time(job: Job, repeats: int = 3) -> float:
    """Seconds of a step in which the network takes none: the least of some."""
    found = []
    for number in range(repeats):
        data = job.data(number)
        devices.settle(job.network.device)
        start = time.perf_counter()
        job.train(data, number, lambda: None)
        devices.settle(job.network.device)
        found.append(time.perf_counter() - start)
    return min(found)


def measure(experiment: Experiment, kind: devices.Kind = devices.CPU) -> Seen:
    """The same on a rank of a live job, which this process is: what a rehearsal must have predicted."""
    network = Network(experiment.grid, devices.current(kind), experiment.patience)
    fill = fill_of(experiment, experiment.skeleton(), network.device)
    with Tracker() as tracker, network.recording() as ledger:
        return watch(build(experiment, network, fill), tracker, ledger)


def empty_values(dtype: torch.dtype, device: torch.device) -> Fill:
    """For tensors without values."""
    return lambda _, block: torch.empty(block.local, dtype=dtype, device=device)
