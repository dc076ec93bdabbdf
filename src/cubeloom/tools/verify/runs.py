"""The two runs that are compared. Both run on ranks of a pool and exchange data through a folder of safetensors files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cubeloom.base.torch_private import FlopCounter
from cubeloom.comm import Network, devices
from cubeloom.parallel import apply, materialise
from cubeloom.parallel.arranged import Lie, lie_of
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.specs import fp8_layers
from cubeloom.tools.verify.experiment import Experiment
from cubeloom.tools.verify.fp8 import rounding
from cubeloom.tools.verify.live import Train, build, fill_of, plainly, serial_adamw
from cubeloom.train import BlockOptimizer, ShardedOptimizer

WEIGHTS = "weights.safetensors"
FLOPS = "flops.json"  # of the first step
_NEGLIGIBLE = 1e-6


def gradients_of(step: int) -> str:
    return f"gradients{step}.safetensors"


@dataclass
class Outcome:
    """The observations of one rank."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)  # the largest difference of each parameter's gradient
    weights: dict[str, float] = field(default_factory=dict)
    counted: dict[str, Fraction] = field(default_factory=dict)
    parameters: int = 0
    flops: int | None = None  # of the first step; None if torch cannot count them
    digests: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)  # of each block's bits, at the end


def serial_run(experiment: Experiment, folder: str, kind: devices.Kind) -> Outcome:
    """Train the plain model on one rank, and write its gradients of each step and its final weights to the folder."""
    device = devices.use(kind, 0)
    devices.compute_in_full()
    model = experiment.skeleton()
    fill = fill_of(experiment, model, device)
    # Only the cube's dropout depends on the position alone, so with dropout the serial model is a cube of one device.
    state = None
    if experiment.drops:
        network = Network(experiment.grid, device)
        state = apply(model, experiment.cut(model), network, experiment.batch, fill, experiment.rest)
    else:
        materialise(model, fill)
    step_on = plainly(model, state)
    if state is None and experiment.rest.precision == "fp8":
        step_on = rounding(model, fp8_layers(experiment.specs()), step_on)
    outcome = Outcome()
    optimizer = serial_adamw(model, experiment)
    for step in train(step_on, optimizer, experiment, experiment.grid.coordinates(0), device, outcome):
        save_file(whole(model, gradients=True), Path(folder) / gradients_of(step))
    save_file(whole(model, gradients=False), Path(folder) / WEIGHTS)
    (Path(folder) / FLOPS).write_text(json.dumps(outcome.flops), encoding="utf-8")
    return outcome


def whole(model: nn.Module, gradients: bool) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.data
        if tensor is not None:
            found[name] = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu().contiguous()
    return found


def grid_run(experiment: Experiment, folder: str, kind: devices.Kind) -> Outcome:
    """Train on the grid, and compare each rank's blocks with those of the serial model."""
    device = devices.current(kind)
    devices.compute_in_full()
    network = Network(
        experiment.grid,
        device,
        experiment.patience,
        num_comm_channels=devices.num_comm_channels(kind, experiment.grid.world),
    )
    fill = fill_of(experiment, experiment.skeleton(), device)
    live = build(experiment, network, fill)
    parameters, optimizer = live.parameters, live.optimizer
    outcome = Outcome(parameters=sum(local_of(parameter).numel() for parameter in parameters.values()))
    with network.recording() as ledger:
        for step in train(live.step, optimizer, experiment, network.coordinates, device, outcome):
            if experiment.asynchronous:
                continue  # updates consumed its gradients within the step
            blocks = _gradient_blocks(parameters, optimizer, network)
            found = compare(blocks, Path(folder) / gradients_of(step), parameters)
            outcome.gradients = {name: max(each, outcome.gradients.get(name, 0.0)) for name, each in found.items()}
    outcome.counted = ledger.by_axis()
    # A step changes a weight by about the learning rate.
    weights = _weight_blocks(parameters, network)
    outcome.weights = compare(weights, Path(folder) / WEIGHTS, parameters, least=experiment.learning_rate)
    outcome.digests = dict(_digests(parameters, network))
    return outcome


def train(
    step_on: Train,
    optimizer: Optimizer | BlockOptimizer | ShardedOptimizer,
    experiment: Experiment,
    coordinates: dict[str, int],
    device: torch.device,
    outcome: Outcome,
) -> Iterator[int]:
    """Train, and yield the number of each step after its backward."""
    for step in range(experiment.steps):
        data = {name: tensor.to(device) for name, tensor in experiment.share(step, coordinates).items()}
        if step or experiment.compile or experiment.record:  # torch does not count compiled or recorded code
            outcome.losses.append(step_on(data, step))
        else:
            with FlopCounter() as counter:
                outcome.losses.append(step_on(data, step))
            outcome.flops = counter.total
        yield step
        if not experiment.asynchronous:
            optimizer.step()
            optimizer.zero_grad()


# The position of a local tensor in the whole one; None if it is padding.
Where = tuple[slice, ...] | None
Blocks = dict[str, list[tuple[Tensor, Where]]]


def _lying(local: Tensor, lie: Lie) -> list[tuple[Tensor, Where]]:
    def where(rows: Tensor, offset: tuple[int, ...]) -> Where:
        return tuple(slice(start, start + size) for start, size in zip(offset, rows.shape, strict=True))

    return [(rows, None if run.first is None else where(rows, lie.offset_of(run))) for run, rows in lie.parts(local)]


def _weight_blocks(parameters: Mapping[str, nn.Parameter], network: Network) -> Blocks:
    return {name: _lying(local_of(each), lie_of(each, network)) for name, each in parameters.items()}


def _digests(
    parameters: Mapping[str, nn.Parameter], network: Network
) -> Iterator[tuple[tuple[str, tuple[int, ...]], str]]:
    """Digests of the bits of each block, by name and position; copies of rows must have the same bits, too."""
    for name, parameter in parameters.items():
        lie = lie_of(parameter, network)
        for run, rows in lie.parts(local_of(parameter)):
            if run.first is not None:
                yield (name, lie.offset_of(run)), _digest(rows)


def _gradient_blocks(
    parameters: Mapping[str, nn.Parameter], optimizer: BlockOptimizer | ShardedOptimizer, network: Network
) -> Blocks:
    """The existing gradients: of parameters, or of the parts that this rank updates."""
    found: Blocks = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            found[name] = _lying(local_of(parameter.grad), lie_of(parameter, network))
        elif isinstance(optimizer, ShardedOptimizer) and optimizer.parts[parameter].tensor.grad is not None:
            part = optimizer.parts[parameter]
            assert part.tensor.grad is not None
            found[name] = _lying(part.tensor.grad, lie_of(parameter, network, part.rows))
    return found


def compare(mine: Blocks, file: Path, names: Collection[str], least: float | None = None) -> dict[str, float]:
    """How far this rank's blocks differ from the serial tensors, relative to each tensor's largest value, or at least
    to `least`.

    By default `least` is a millionth of the largest value of all tensors: a tensor that is zero except for rounding,
    such as the gradient of an attention key's bias, says nothing by itself. A tensor of `names` that exists on one side
    only, such as a gradient that was not computed, is infinitely far off. So is padding that is not zero.
    """
    found = {}
    with safe_open(file, "pt") as serial:
        there = set(serial.keys())
        if least is None:
            least = _NEGLIGIBLE * max((serial.get_tensor(name).abs().max().item() for name in there), default=0.0)
        for name in names:
            if (name in mine) != (name in there):
                found[name] = math.inf
            elif name in mine:
                theirs = serial.get_tensor(name)
                scale = max(theirs.abs().max().item(), least) or 1.0
                found[name] = max(_difference(local.cpu(), theirs, where, scale) for local, where in mine[name])
    return found


def _difference(local: Tensor, theirs: Tensor, where: Where, scale: float) -> float:
    if where is None:
        return math.inf if local.any() else 0.0
    return no_less_than_nan((local - theirs[where]).abs().max().item() / scale)


def differences_of_files(mine: Path, theirs: Path, least: float | None = None) -> dict[str, float]:
    """The same for two serial runs."""
    tensors = load_file(mine)
    return compare(
        {name: [(each, (slice(None),) * each.dim())] for name, each in tensors.items()}, theirs, tensors, least
    )


def no_less_than_nan(difference: float) -> float:
    """NaN compares as neither larger nor smaller and would be lost among differences: replace it by infinity."""
    return math.inf if math.isnan(difference) else difference


def _digest(local: Tensor) -> str:
    return hashlib.blake2b(local.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
