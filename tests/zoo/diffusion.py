"""Models of diffusers with the loss that they are trained with: each function gives a module whose forward gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional


class Denoiser(nn.Module):
    """A model of diffusers, with the loss that it is trained with."""

    def __init__(self, model: Any, call: Callable[..., Tensor]) -> None:
        """`call` gives what the model makes of an image, a time, a label and a text, which is vectors."""
        super().__init__()
        self.model, self.call = model, call

    def forward(self, sample: Tensor, timestep: Tensor, labels: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        return functional.mse_loss(self.call(self.model, sample, timestep, labels, text)[:, :3], noise)


def unet() -> nn.Module:
    made = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return Denoiser(made, lambda model, sample, time, *_: model(sample, timestep=time).sample)


def dit() -> nn.Module:
    """With a label for each image: it drops none of them, which would be drawn at random."""
    made = dit_that_drops_labels()
    for module in made.modules():
        if hasattr(module, "dropout_prob"):
            setattr(module, "dropout_prob", 0.0)  # noqa: B010
    return made


def dit_that_drops_labels() -> nn.Module:
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
    return Denoiser(
        made, lambda model, sample, time, labels, _: model(sample, timestep=time, class_labels=labels).sample
    )


def _with_text(model: Any, sample: Tensor, timestep: Tensor, labels: Tensor, text: Tensor) -> Tensor:
    found: Tensor = model(sample, timestep=timestep, encoder_hidden_states=text).sample
    return found


def unet_with_text() -> nn.Module:
    made = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return Denoiser(made, _with_text)


def stable_diffusion_3() -> nn.Module:
    made = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )

    def call(model: Any, sample: Tensor, timestep: Tensor, labels: Tensor, text: Tensor) -> Any:
        return model(sample, timestep=timestep, encoder_hidden_states=text, pooled_projections=text[:, 0, :16]).sample

    return Denoiser(made, call)


def pixart() -> nn.Module:
    made = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        cross_attention_dim=32,
        caption_channels=32,
        use_additional_conditions=False,
    )
    return Denoiser(made, _with_text)


def autoencoder() -> nn.Module:
    made = diffusers.AutoencoderKL(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
    )
    return Denoiser(made, lambda model, sample, *_: model.decode(model.encode(sample).latent_dist.mode()).sample)


def example(samples: int, sequence: int, seed: int) -> dict[str, Tensor]:
    """Images, times, labels, texts and noise."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, samples, 3, 8, 8, generator=generator, device="cpu")
    times = torch.randint(0, 1000, (samples,), generator=generator, device="cpu")
    text = torch.randn(samples, 5, 32, generator=generator, device="cpu")
    return {"sample": images[0], "timestep": times, "labels": times % 10, "text": text, "noise": images[1]}
