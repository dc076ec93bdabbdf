"""Models of diffusers with the loss that they are trained with: each function gives a module whose forward gives it."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional


class Denoiser(nn.Module):
    """A model of diffusers, with the loss that it is trained with."""

    def __init__(self, model: Any, labelled: bool) -> None:
        super().__init__()
        self.model, self.labelled = model, labelled

    def forward(self, sample: Tensor, timestep: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        more = {"class_labels": labels} if self.labelled else {}
        return functional.mse_loss(self.model(sample, timestep=timestep, **more).sample[:, :3], noise)


def unet() -> nn.Module:
    return Denoiser(
        diffusers.UNet2DModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        labelled=False,
    )


def dit() -> nn.Module:
    made = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        sample_size=8,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
        dropout=0.0,
    )
    return Denoiser(made, labelled=True)


def example(samples: int, sequence: int, seed: int) -> dict[str, Tensor]:
    """Of the models of diffusers: images, times and noise."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, samples, 3, 8, 8, generator=generator, device="cpu")
    times = torch.randint(0, 1000, (samples,), generator=generator, device="cpu")
    return {"sample": images[0], "timestep": times, "labels": times % 10, "noise": images[1]}
