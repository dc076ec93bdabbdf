"""The optimizer of a job, on the parts of parameters that this rank updates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from cubeloom.comm import Network
from cubeloom.parallel.arranged import lie_of
from cubeloom.parallel.gradients import Gradients
from cubeloom.train.adamw import AdamW
from cubeloom.train.block_optimizer import BlockOptimizer
from cubeloom.train.job.settings import OptimizerSettings
from cubeloom.train.sharded_optimizer import ShardedOptimizer

KINDS: dict[str, type[torch.optim.AdamW | torch.optim.SGD]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def optimizer_of(
    settings: OptimizerSettings,
    parameters: Mapping[str, nn.Parameter],
    gradients: Gradients,
    network: Network,
) -> BlockOptimizer | ShardedOptimizer:
    make = partial(fused, settings)
    made = (
        ShardedOptimizer(parameters.values(), gradients, make, settings.masters, settings.offload)
        if settings.zero
        else BlockOptimizer(parameters.values(), make, settings.masters, settings.offload)
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


def fused(settings: OptimizerSettings, parts: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Updates all parts in a few kernels, which also clip and skip if told to."""
    groups = [
        {"params": [part for part in parts if part.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [part for part in parts if part.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    own: dict[str, Any] = (
        {"momentum": settings.momentum} if settings.name == "sgd" else {"betas": settings.betas, "eps": settings.eps}
    )
    if settings.moments is not None:
        return AdamW(groups, **own)
    made = KINDS[settings.name](groups, **own, fused=True)
    if own.get("momentum"):
        # torch allocates this state in the first step, and leaves it uninitialised if that step is skipped.
        for part in parts:
            made.state[part]["momentum_buffer"] = torch.zeros_like(part)
    return made
