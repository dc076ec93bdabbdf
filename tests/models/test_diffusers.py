"""The U-Net computes what diffusers' UNet2DModel does, from its weights, and mixes noise in as DDPM's schedule says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from cubeloom import UserError
from cubeloom.models import PRESETS, UNet, UNetConfig, config_from_diffusers, from_hugging_face, to_hugging_face

Theirs = Any  # diffusers has no types we could use

MODELS: dict[str, dict[str, Any]] = {
    "no attention": {"levels": (False, False), "add_attention": False},
    "attention at one level": {"levels": (False, True, False)},
    "attention everywhere": {"levels": (True, True), "layers_per_block": 1},
    "one head": {"levels": (False, True), "attention_head_dim": None},
    "uneven widths": {"levels": (False, True, False), "block_out_channels": (16, 24, 40)},
    "one level": {"levels": (True,)},
    "sines first": {"levels": (False, True), "flip_sin_to_cos": False, "freq_shift": 1},
    "padded after": {"levels": (False, False, True), "downsample_padding": 0, "norm_eps": 1e-6},
}
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())


def theirs_with(levels: tuple[bool, ...], dtype: torch.dtype = torch.float64, **options: Any) -> Theirs:
    """A small model with random values everywhere, so that no mistake hides behind a zero or a one."""
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        **{
            "sample_size": 8,
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ["AttnDownBlock2D" if attends else "DownBlock2D" for attends in levels],
            "up_block_types": ["AttnUpBlock2D" if attends else "UpBlock2D" for attends in reversed(levels)],
            "block_out_channels": (16, 32, 32)[: len(levels)],
            "attention_head_dim": 4,
            "norm_num_groups": 4,
            **options,
        }
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.02, std=0.1)
    return model.eval().to(dtype)


def ours_of(theirs: Theirs) -> UNet:
    config = config_from_diffusers(dict(theirs.config))
    ours = UNet(config).to(theirs.dtype)
    ours.load_state_dict(from_hugging_face(config, theirs.state_dict()))
    return ours.eval()


def noisy(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 3, 8, 8, generator=generator, dtype=dtype), torch.tensor([0, 17, 999])


@every_model
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), pytest.param(torch.float32, 1e-5, marks=pytest.mark.long)]
)
def test_predictions_and_gradients_agree(options: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    theirs = theirs_with(**options, dtype=dtype)
    ours = ours_of(theirs)
    x, times = noisy(dtype)
    expected, found = theirs(x, times).sample, ours.predict(x, times)
    assert (found - expected).abs().max() < tolerance * expected.abs().max()
    expected.square().sum().backward()
    found.square().sum().backward()
    # A gradient has the layout of its parameter, so it converts as the parameter does.
    gradients = from_hugging_face(ours.config, {name: value.grad for name, value in theirs.named_parameters()})
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - gradients[name]).abs().max() < tolerance * largest, name


@every_model
def test_theirs_to_ours_and_back_is_exact(options: dict[str, Any]) -> None:
    theirs = theirs_with(**options)
    back = to_hugging_face(ours_of(theirs).config, ours_of(theirs).state_dict())
    state = theirs.state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_noise_is_mixed_in_as_theirs() -> None:
    model = ours_of(theirs_with(levels=(False, False)))
    images, times = noisy(torch.float64)
    noise = torch.randn_like(images)
    expected = diffusers.DDPMScheduler().add_noise(images, noise, times)
    assert (model.mix(images, noise, times) - expected).abs().max() < 1e-5  # their schedule is float32


def test_the_model_of_cifar10_is_the_preset() -> None:
    config = {
        "_class_name": "UNet2DModel",
        "act_fn": "silu",
        "add_attention": True,
        "attention_head_dim": None,
        "block_out_channels": [128, 256, 256, 256],
        "center_input_sample": False,
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"],
        "downsample_padding": 0,
        "dropout": 0.0,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "in_channels": 3,
        "layers_per_block": 2,
        "mid_block_scale_factor": 1,
        "norm_eps": 1e-06,
        "norm_num_groups": 32,
        "out_channels": 3,
        "sample_size": 32,
        "time_embedding_type": "positional",
        "up_block_types": ["UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
    }
    assert config_from_diffusers(config) == PRESETS["unet-cifar10"]
    with torch.device("meta"):
        theirs = diffusers.UNet2DModel.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == 35_746_307


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("resnet_time_scale_shift", "scale_shift"),
        ("time_embedding_type", "fourier"),
        ("downsample_type", "resnet"),
        ("num_class_embeds", 10),
        ("attn_norm_num_groups", 8),
        ("time_embedding_dim", 32),
        ("mid_block_scale_factor", 2),
        ("sample_size", (8, 16)),
    ],
)
def test_options_that_ours_does_not_have_are_refused(option: str, value: object) -> None:
    config = {**theirs_with(levels=(False, True)).config, option: value}
    with pytest.raises(UserError, match=f"{option}=.* is not supported; it must be"):
        config_from_diffusers(config)


def test_other_models_and_blocks_are_refused() -> None:
    config = dict(theirs_with(levels=(False, True)).config)
    with pytest.raises(UserError, match="no model here is diffusers' 'UNet2DConditionModel'"):
        config_from_diffusers({**config, "_class_name": "UNet2DConditionModel"})
    with pytest.raises(UserError, match="has no layers_per_block"):
        config_from_diffusers({name: value for name, value in config.items() if name != "layers_per_block"})
    for blocks in ({"down_block_types": ["DownBlock2D"] * 2}, {"up_block_types": ["SkipUpBlock2D", "UpBlock2D"]}):
        with pytest.raises(UserError, match="on the way up the same in reverse"):
            config_from_diffusers({**config, **blocks})


def test_a_state_of_another_unet_is_refused() -> None:
    theirs = theirs_with(levels=(False, True))
    config = config_from_diffusers(dict(theirs.config))
    with pytest.raises(UserError, match=r"unexpected: mid_block\.attentions\.0\.group_norm\.weight"):
        from_hugging_face(replace(config, middle_attention=False), theirs.state_dict())
    with pytest.raises(UserError, match="weights of a ResNet cannot be read"):
        from_hugging_face(PRESETS["resnet-tiny"], theirs.state_dict())
    assert isinstance(config, UNetConfig)
