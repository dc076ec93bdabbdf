"""The reference of an asynchronous schedule: the serial model, trained with weights as stale as the schedule's
definition says.

The group of micro-batches in update g of a stage computes with the version that `memory.versions` gives it. Under
PipeDream-2BW W(g+1) = W(g) - lr · gradient at W(g-1), where lr · gradient stands for any optimizer's change.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from cubeloom.base.torch_private import FlopCounter
from cubeloom.comm import devices
from cubeloom.parallel import materialise
from cubeloom.pipeline import Schedule
from cubeloom.pipeline.memory import versions
from cubeloom.pipeline.runtime.build import StagePlan
from cubeloom.pipeline.runtime.microbatches import cut_up, portions
from cubeloom.tools.verify.experiment import Experiment
from cubeloom.tools.verify.live import fill_of, serial_adamw
from cubeloom.tools.verify.runs import FLOPS, WEIGHTS, Outcome, whole


def stale_run(experiment: Experiment, folder: str, kind: devices.Kind) -> Outcome:
    """Train on one rank, and write the final weights to the folder."""
    schedule = experiment.schedule
    assert schedule is not None
    device = devices.use(kind, 0)
    model = experiment.skeleton()
    materialise(model, fill_of(experiment, model, device))
    optimizer = serial_adamw(model, experiment)
    used = _versions_of_groups(schedule)
    stages = _stages(model, experiment.layout(schedule))
    outcome, counter = Outcome(), FlopCounter()
    for step in range(experiment.steps):
        history = [_values(model)]
        losses = []
        for group, data in enumerate(_groups(experiment, schedule, step)):
            inputs = {name: tensor.to(device) for name, tensor in data.items()}
            seen = {name: history[used[stages[name], group]][name].requires_grad_() for name in stages}
            with nullcontext() if step else counter:
                loss: Tensor = functional_call(model, seen, kwargs=inputs)
                gradients = torch.autograd.grad(loss, list(seen.values()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            history.append(_values(model))
            losses.append(loss.item())
        outcome.losses.append(sum(losses) / len(losses))
    save_file(whole(model, gradients=False), Path(folder) / WEIGHTS)
    (Path(folder) / FLOPS).write_text(json.dumps(counter.total), encoding="utf-8")
    return outcome


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _versions_of_groups(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The version that a stage uses for a group, the same for all of its micro-batches."""
    return {
        (stage, schedule.groups[microbatch]): version
        for worker in range(len(schedule.workers))
        for (_, stage, microbatch), version in versions(schedule, worker).items()
    }


def _stages(model: nn.Module, layout: StagePlan) -> dict[str, int]:
    """The stage of each parameter; for a tied one that of its owner."""
    owners = {spec.name: stage for stage in range(len(layout.stages)) for spec in reversed(layout.specs_of(stage))}
    known = {name: layout.aliases.get(name, name) for name, _ in model.named_parameters()}
    return {name: owners[layer.rpartition(".")[0]] for name, layer in known.items()}


def _groups(experiment: Experiment, schedule: Schedule, step: int) -> list[dict[str, Tensor]]:
    """The samples of each group, from all ranks."""
    grid = experiment.grid
    ranks = [{**grid.coordinates(0), "data": data, "z": z} for data in range(grid.data) for z in range(grid.z)]
    cut = [cut_up(experiment.share(step, here), portions(schedule)) for here in ranks]
    return [
        {
            name: torch.cat(
                [each[m, None][name] for each in cut for m, of in enumerate(schedule.groups) if of == group]
            )
            for name in experiment.samples(step)
        }
        for group in range(1 + schedule.groups[-1])
    ]
