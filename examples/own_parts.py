"""A model, a loss, an optimizer and data of your own, named in a settings file: examples/own_parts.toml.

cubeloom train examples/own_parts.toml
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.train.job import Job
from cubeloom.train.job.settings import OptimizerSettings

CLASSES = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fall(functional.gelu(self.rise(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))  # stages of a pipeline are cut between them
        self.head = nn.Linear(16, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        x = self.stem(points)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> nn.Module:
    """For `model.name`."""
    return Net()


def example(samples: int, sequence: int, seed: int) -> dict[str, Tensor]:
    """Beside a model that takes no tokens: the keyword arguments of one batch, with which it is run to find its cut."""
    return _spiral(torch.arange(samples) + seed)


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    """For `model.loss`: from the forward's output and the targets to the mean over the batch."""
    return functional.cross_entropy(logits, targets, label_smoothing=0.05)


class Spiral:
    """Samples by number: the same number always gives the same sample, on every grid and after a restart."""

    sequence, as_forward = 1, True  # the names are those of the forward

    def __init__(self, first: int, dtype: torch.dtype) -> None:
        self.first, self.dtype = first, dtype

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        return _spiral(numbers + self.first, self.dtype)


def spiral(job: Job, part: str) -> Spiral:
    """For `data.name`: the job has seed, batch and dtype; the part is "training" or "validation"."""
    return Spiral(1_000_000 if part == "validation" else 0, job.numbers)


def _spiral(numbers: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    targets, along = numbers % CLASSES, (numbers * 0.618) % 1
    angle = 4 * along + 2 * torch.pi * targets / CLASSES
    points = along[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return {"points": points.to(dtype), "targets": targets}


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv 2302.06675. Element-wise: what a rank computes of a part is a part of the whole update."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 1e-4, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(mean.lerp(parameter.grad, 1 - fast).sign_(), alpha=group["lr"])
                mean.lerp_(parameter.grad, 1 - slow)


def lion(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """For `optimizer.name`: the groups have parameters and weight decay, the settings are those of `[optimizer]`."""
    return Lion(groups, settings.betas)
