"""The ResNet by itself: shapes, pieces, initial values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cubeloom.base.initial import Constant, Normal
from cubeloom.models import PRESETS, ResNet, ResNetConfig

from .composed import carries

TINY = PRESETS["resnet-tiny"]
assert isinstance(TINY, ResNetConfig)
CONFIGS = {
    "small images": TINY,
    "large images": replace(TINY, small_images=False, blocks=(2, 1)),
    "wide": replace(TINY, widen=2, channels=1),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def batch(config: ResNetConfig, device: str = "cpu") -> dict[str, Tensor]:
    torch.manual_seed(0)
    data = {"images": torch.randn(4, config.channels, 16, 16), "targets": torch.tensor([0, 5, -100, 23])}
    return {name: tensor.to(device) for name, tensor in data.items()}


@every_config
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_forward_gives_logits_or_a_loss(config: ResNetConfig, device: str) -> None:
    data = batch(config, device)
    with torch.device(device):
        model = ResNet(config)
        assert model(data["images"]).shape == (4, 24)
        loss = model(**data)
        loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())


@every_config
def test_pieces_compose_to_forward(config: ResNetConfig) -> None:
    model, data = ResNet(config), batch(config)
    last = carries(model, data)[-1]
    assert last.keys() == {"loss"}
    assert torch.equal(last["loss"], model(**data))
    pieces = [name for piece in model.pieces() for name in piece.modules]
    assert all(any(name.startswith(f"{module}.") for module in pieces) for name, _ in model.named_parameters())


def test_each_stage_but_the_first_halves_the_image() -> None:
    handed = carries(ResNet(CONFIGS["small images"]), batch(CONFIGS["small images"]))
    assert [carry["x"].shape[1:] for carry in handed[:-1]] == [(24, 16, 16), (24, 16, 16), (48, 8, 8), (96, 4, 4)]
    handed = carries(ResNet(CONFIGS["large images"]), batch(CONFIGS["large images"]))
    assert [carry["x"].shape[1:] for carry in handed[:-1]] == [(24, 4, 4)] * 3 + [(48, 2, 2)]


def test_initial_values_keep_the_variance_through_a_relu() -> None:
    model = ResNet(CONFIGS["small images"])
    expected = {
        "conv_in.weight": Normal((2 / 27) ** 0.5),
        "blocks.1.conv1.weight": Normal((2 / 216) ** 0.5),
        "blocks.1.skip.weight": Normal((2 / 24) ** 0.5),
        "blocks.1.bn2.weight": Constant(1.0),
        "blocks.1.skip_norm.bias": Constant(0.0),
        "head.weight": Normal(0.01),
        "head.bias": Constant(0.0),
    }
    assert {name: model.initial(name) for name in expected} == expected


def test_norms_follow_the_statistics_of_batches() -> None:
    model = ResNet(CONFIGS["small images"])
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 1 + 2 * 3 + 2
    model(**batch(CONFIGS["small images"]))
    assert all(norm.num_batches_tracked == 1 for norm in norms)
