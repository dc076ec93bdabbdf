"""The optimizer of a job, on the parts of parameters that this rank updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.parallel.arranged import lie_of
from cubeloom.parallel.gradients import Gradients
from cubeloom.train.adamw import AdamW
from cubeloom.train.block_optimizer import BlockOptimizer
from cubeloom.train.job.registries import OPTIMIZERS
from cubeloom.train.job.settings import OptimizerSettings
from cubeloom.train.sharded_optimizer import ShardedOptimizer

Groups = list[dict[str, Any]]
Builder = Callable[[Groups, OptimizerSettings], Optimizer]


def adamw(groups: Groups, settings: OptimizerSettings) -> Optimizer:
    if settings.moments is not None:
        return AdamW(groups, betas=settings.betas, eps=settings.eps)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True)


def sgd(groups: Groups, settings: OptimizerSettings) -> Optimizer:
    made = torch.optim.SGD(groups, momentum=settings.momentum, fused=True)
    if settings.momentum:
        # torch allocates this state in the first step, and leaves it uninitialised if that step is skipped.
        for part in (each for group in groups for each in group["params"]):
            made.state[part]["momentum_buffer"] = torch.zeros_like(part)
    return made


def optimizer_of(
    settings: OptimizerSettings,
    parameters: Mapping[str, nn.Parameter],
    gradients: Gradients,
    network: Network,
    builder: Builder | None = None,
) -> BlockOptimizer | ShardedOptimizer:
    """`builder`: a program's own; by default the one that the settings name."""
    make = partial(build_optimizer, settings, builder=builder)
    made = (
        ShardedOptimizer(parameters.values(), gradients, make, settings.fp32_master_weights, settings.offload)
        if settings.shard_optimizer_state
        else BlockOptimizer(parameters.values(), make, settings.fp32_master_weights, settings.offload)
    )
    locate(made, parameters, network)
    return made


def locate(
    optimizer: BlockOptimizer | ShardedOptimizer, parameters: Mapping[str, nn.Parameter], network: Network
) -> None:
    """Tell an optimizer that rounds stochastically where the parts lie in their whole tensors."""
    if isinstance(optimizer.optimizer, AdamW):
        for name, parameter in parameters.items():
            part = optimizer.parts[parameter]
            optimizer.optimizer.locate(part.tensor, name, lie_of(parameter, network, part.rows))


def build_optimizer(
    settings: OptimizerSettings, parts: list[nn.Parameter], builder: Builder | None = None
) -> Optimizer:
    """The optimizer of these parts. Weight decay is for matrices."""
    groups = [
        {"params": [part for part in parts if part.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [part for part in parts if part.dim() <= 1], "weight_decay": 0.0},
    ]
    made = (builder or OPTIMIZERS.find(settings.name))([group for group in groups if group["params"]], settings)
    if not isinstance(made, Optimizer):
        raise UserError(
            f"optimizer.name = {settings.name!r} gives {type(made).__name__}, and not a torch.optim.Optimizer"
        )
    return made


def check_elementwise(settings: OptimizerSettings, builder: Builder | None = None) -> str:
    """Check that updating the halves of a matrix gives the halves of its update, as ranks do; return the class's name.

    A state of another shape than its parameter's, except a count named `step`, would not fit into a checkpoint.
    """
    name, whole = _tried(settings, builder)
    for dim in (0, 1):
        if not torch.allclose(_tried(settings, builder, 2, dim)[1], whole, rtol=1e-5, atol=1e-7):
            raise UserError(
                f"optimizer.name = {settings.name!r}: {name} is not element-wise: it updates a part of a matrix otherwise than"
                " the whole matrix, and each rank updates only the part that it has"
            )
    return name


def _tried(
    settings: OptimizerSettings, builder: Builder | None, count: int = 1, dim: int = 0
) -> tuple[str, torch.Tensor]:
    """The optimizer's class, and what three updates make of a matrix that is cut into this many parts."""
    matrix = torch.arange(24.0).view(4, 6)
    parts = [nn.Parameter(each.clone()) for each in matrix.sin().chunk(count, dim)]
    made = build_optimizer(settings, parts, builder)
    if isinstance(made, AdamW):
        return type(made).__name__, matrix  # rounds by the place in the whole tensor, which `locate` says
    for group in made.param_groups:
        group["lr"] = 0.1  # as every step does
    for step in range(3):
        for part, gradient in zip(parts, matrix.cos().chunk(count, dim), strict=True):
            part.grad = gradient * (step + 1)
        made.step()
    for part in parts:
        for key, value in made.state[part].items():
            if key != "step" and not (isinstance(value, torch.Tensor) and value.shape == part.shape):
                raise UserError(
                    f"optimizer.name = {settings.name!r}: {type(made).__name__} keeps {key!r}, and a checkpoint can store only"
                    " tensors of the parameter's shape, and the number `step` of updates"
                )
    return type(made).__name__, torch.cat([part.detach() for part in parts], dim)
