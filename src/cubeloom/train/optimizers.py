"""The optimizer of a job, on the parts of parameters that this rank updates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from cubeloom.parallel.gradients import Gradients
from cubeloom.train.block_optimizer import BlockOptimizer
from cubeloom.train.job.settings import OptimizerSettings
from cubeloom.train.sharded_optimizer import ShardedOptimizer

KINDS: dict[str, type[torch.optim.AdamW | torch.optim.SGD]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def optimizer_of(
    settings: OptimizerSettings,
    parameters: Mapping[str, nn.Parameter],
    gradients: Gradients,
) -> BlockOptimizer | ShardedOptimizer:
    make = partial(fused, settings)
    if settings.zero:
        return ShardedOptimizer(parameters.values(), gradients, make, settings.masters)
    return BlockOptimizer(parameters.values(), make, settings.masters)


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
    made = KINDS[settings.name](groups, **own, fused=True)
    if own.get("momentum"):
        # torch allocates this state in the first step, and leaves it uninitialised if that step is skipped.
        for part in parts:
            made.state[part]["momentum_buffer"] = torch.zeros_like(part)
    return made
