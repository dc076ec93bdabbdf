"""One rank of an experiment: its part of the model, its optimizer, its steps. The same for a live job and a rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cubeloom.base import counter
from cubeloom.comm import Network
from cubeloom.models.weights import stored_values
from cubeloom.parallel import Batch, CubeState, apply, resolve
from cubeloom.parallel.arranged import Lie
from cubeloom.parallel.gradients import Gradients
from cubeloom.parallel.parameter import Block, local_of
from cubeloom.parallel.recomputed import recompute_blocks
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.weave import Weave
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.channels import Boundary
from cubeloom.pipeline.runtime.recorded import GraphRecord
from cubeloom.tools.verify.experiment import Experiment
from cubeloom.train import BlockOptimizer, ShardedOptimizer
from cubeloom.train.adamw import AdamW
from cubeloom.train.offload import elements_of
from cubeloom.train.optimizers import locate

# The tensors that each stage sends to the next, if the network cannot tell.
Known = Mapping[int, Boundary]


def fill_of(experiment: Experiment, model: nn.Module, device: torch.device) -> Fill:
    if experiment.weights is not None:
        fill = stored_values(experiment.weights, model, experiment.dtype, device)
    else:
        fill = experiment.model.fill(model, experiment.initial_seed, experiment.dtype, device)
    return _nudged(fill, max(side for each in model.parameters() for side in each.shape)) if experiment.nudged else fill


def _nudged(fill: Fill, longest: int) -> Fill:
    """Change each value by what rounding does to a sum of `longest` terms, up or down at random.

    Sums of n terms in another order differ by about √n units of the precision in which they are added (at least
    float32), and results by one unit of their own.
    """

    def nudged(name: str, block: Block) -> Tensor:
        values = fill(name, block)
        added = torch.promote_types(values.dtype, torch.float32)
        size = max(torch.finfo(values.dtype).eps, torch.finfo(added).eps * longest**0.5)
        index = torch.arange(values.numel(), device=values.device).view_as(values)
        sign = (counter.uniform(counter.key(1, name), index) < 0.5).double() * 2 - 1
        return (values.double() * (1 + size * sign)).to(values.dtype)

    return nudged


# AdamW divides a gradient by its own magnitude, so a gradient that is zero except for rounding (such as that of an
# attention key's bias) becomes a full-size update. Its epsilon must be far above that rounding, which scales with the
# tensor's largest gradient: with gradients up to 0.05 in float32 it is 3e-8, and would be 3e-4 of an update if epsilon
# were 1e-4.
EPSILON = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 1e-3}


def adamw(parameters: Iterable[nn.Parameter], experiment: Experiment) -> Optimizer:
    """In one kernel, as in `train`: it needs no additional memory."""
    if experiment.moments is not None:
        return AdamW(parameters, lr=experiment.learning_rate, eps=EPSILON[experiment.dtype])
    return torch.optim.AdamW(parameters, lr=experiment.learning_rate, eps=EPSILON[experiment.dtype], fused=True)


def serial_adamw(model: nn.Module, experiment: Experiment) -> Optimizer:
    """Of a model that no grid cuts."""
    made = adamw(model.parameters(), experiment)
    if isinstance(made, AdamW):
        for name, parameter in model.named_parameters():
            made.locate(parameter, name, Lie(tuple(parameter.shape), (0,) * parameter.dim(), ()))
    return made


# One forward and backward of a step on a rank's samples; returns the loss.
Train = Callable[[dict[str, Tensor], int], float]


def plainly(model: Callable[..., Tensor], state: CubeState | None) -> Train:
    """Forward and backward without a pipeline."""

    def step_on(data: dict[str, Tensor], step: int) -> float:
        if state is not None:
            state.clock.step = step
        loss = model(**data)
        loss.backward()
        return loss.item()

    return step_on


@dataclass
class Live:
    """A rank that is ready to train. `step` is forward and backward; `update` follows, unless the step includes it."""

    experiment: Experiment
    network: Network
    step: Train
    parameters: dict[str, nn.Parameter]
    optimizer: BlockOptimizer | ShardedOptimizer
    summed: Gradients

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
        """The existing gradients: of parameters, or of the parts that this rank updates."""
        for parameter, part in self.optimizer.parts.items():
            if parameter.grad is not None:
                yield local_of(parameter.grad)
            if part.tensor.grad is not None:
                yield part.tensor.grad

    def optimizer_state(self) -> Iterator[Tensor]:
        """Moments and similar tensors, and master weights: those on the device."""
        parts, made = self.optimizer.parts.values(), self.optimizer.optimizer
        yield from (part.tensor for part in parts if part.master and not part.offload)
        hosted = set(map(id, self.host_state()))
        for state in made.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and id(value) not in hosted)
        if isinstance(made, AdamW):
            yield from made.indices

    def host_state(self) -> Iterator[Tensor]:
        """Those in the host's memory."""
        for part in self.optimizer.parts.values():
            if part.offload:
                yield from elements_of(self.optimizer.optimizer.state[part.tensor]).values()
                yield from () if part.home is None else (part.home,)


def build(experiment: Experiment, network: Network, fill: Fill, known: Known | None = None) -> Live:
    """`known` replaces what workers tell each other before the first step.

    The caller has checked the model: `Experiment.specs()`, once for all ranks.
    """
    model = experiment.skeleton()
    make = partial(adamw, experiment=experiment)
    step: Train
    if experiment.schedule is None:
        strand = Batch(experiment.batch.samples // experiment.ways, experiment.batch.sequence)
        cut = experiment.cut(model)
        specs = resolve(model, cut, experiment.grid, experiment.rest, strand, unchecked=True)
        state = apply(model, cut, network, strand, fill, experiment.rest, experiment.compile, unchecked=True)
        recompute_blocks(model, experiment.blocks(model, specs), specs)
        step, gradients = plainly(Weave(model, experiment.ways, state.staggers), state), state.gradients
        parameters = dict(model.named_parameters())
    else:
        pipeline = Pipeline(
            model,
            experiment.cut(model),
            network,
            experiment.batch,
            fill,
            experiment.schedule,
            experiment.rest,
            recompute=experiment.recompute,
            ways=experiment.ways,
            compile=experiment.compile,
            record=GraphRecord() if experiment.record else None,
            unchecked=True,
        )
        first = experiment.share(0, network.coordinates)
        pipeline.learn({name: tensor.to(network.device) for name, tensor in first.items()}, known)
        step, parameters, gradients = pipeline.step, pipeline.parameters, pipeline.gradients
    optimizer: BlockOptimizer | ShardedOptimizer = (
        ShardedOptimizer(parameters.values(), gradients, make, experiment.fp32_master_weights, experiment.offload)
        if experiment.zero
        else BlockOptimizer(parameters.values(), make, experiment.fp32_master_weights, experiment.offload)
    )
    locate(optimizer, parameters, network)
    live = Live(experiment, network, step, parameters, optimizer, gradients)
    if experiment.asynchronous:
        live.step = partial(pipeline.step, update=live.update)
    return live
