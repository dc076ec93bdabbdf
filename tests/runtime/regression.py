"""A model whose loss is a mean over samples, and its batches."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(3)]
        self.body = nn.Sequential(*blocks, nn.Linear(8, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.body(x), y)


def example(samples: int, sequence: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(samples, 8, generator=generator), "y": torch.randn(samples, 4, generator=generator)}


FILE = Path(__file__)
