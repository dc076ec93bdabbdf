"""The optimizer that a job asks for, on what this rank updates of each parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from cubeloom.cube.gradients import Gradients
from cubeloom.job.settings import OptimizerSettings
from cubeloom.train.block_optimizer import BlockOptimizer
from cubeloom.train.sharded_optimizer import ShardedOptimizer


def optimizer_of(
    settings: OptimizerSettings,
    parameters: Mapping[str, nn.Parameter],
    gradients: Gradients,
) -> BlockOptimizer | ShardedOptimizer:
    def make(parts: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": [part for part in parts if part.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [part for part in parts if part.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        if settings.name == "sgd":
            return torch.optim.SGD(groups, momentum=settings.momentum, fused=True)
        return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True)

    if settings.zero:
        return ShardedOptimizer(parameters.values(), gradients, make, settings.masters)
    return BlockOptimizer(parameters.values(), make, settings.masters)
