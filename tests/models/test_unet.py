"""The U-Net by itself: shapes, pieces and what they hand on, initial values, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cubeloom import UserError
from cubeloom.base.initial import Constant, Normal
from cubeloom.models import PRESETS, MeanSquaredError, UNet, UNetConfig, build, noise_added
from cubeloom.models.weights import check_weights, save_weights

from .composed import carries

TINY = PRESETS["unet-tiny"]
assert isinstance(TINY, UNetConfig)
CONFIGS = {
    "tiny": TINY,
    "attention everywhere": replace(TINY, attention=(True, True, True), res_blocks=2, head_dim=None),
    "no attention": replace(TINY, attention=(False, False, False), middle_attention=False),
    "one level": replace(TINY, multipliers=(2,), attention=(True,)),
    "other channels": replace(TINY, in_channels=1, out_channels=1, multipliers=(1, 3, 2), pad_after=True),
}
every_config = pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, marks=[] if name in ("tiny", "other channels") else pytest.mark.long, id=name)
        for name, config in CONFIGS.items()
    ],
)


def batch(config: UNetConfig, device: str = "cpu") -> dict[str, Tensor]:
    torch.manual_seed(0)
    shape = (3, config.in_channels, config.image, config.image)
    data = {"images": torch.rand(shape) * 2 - 1, "noise": torch.randn(shape), "times": torch.tensor([0, 500, 999])}
    return {name: tensor.to(device) for name, tensor in data.items()}


@every_config
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_forward_gives_a_loss_that_reaches_every_parameter(config: UNetConfig, device: str) -> None:
    data = batch(config, device)
    with torch.device(device):
        model = UNet(config)
        assert model.predict(data["images"], data["times"]).shape == data["noise"].shape
        loss = model(**data)
        loss.backward()
    assert loss.shape == ()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert list(model.buffers()) == []


@every_config
def test_pieces_compose_to_forward(config: UNetConfig) -> None:
    model, data = UNet(config), batch(config)
    last = carries(model, data)[-1]
    assert last.keys() == {"loss"}
    assert torch.equal(last["loss"], model(**data))
    named = {name for name, _ in model.named_parameters()}
    pieces = [name for piece in model.pieces() for name in piece.modules]
    assert len(pieces) == len(set(pieces))
    assert all(any(name.startswith(f"{module}.") for module in pieces) for name in named)


@every_config
def test_all_that_is_handed_on_is_used_and_nothing_twice(config: UNetConfig) -> None:
    model, data = UNet(config), batch(config)
    handed = carries(model, data)
    for carry in handed[:-1]:
        assert len({tensor.data_ptr() for tensor in carry.values()}) == len(carry)
        used = torch.autograd.grad(handed[-1]["loss"], list(carry.values()), retain_graph=True)
        assert all(bool(gradient.any()) for gradient in used)


def test_what_is_handed_on_at_each_place_of_the_u() -> None:
    model = UNet(CONFIGS["tiny"])
    handed = [set(carry) for carry in carries(model, batch(CONFIGS["tiny"]))]
    skips = [f"skip{number}" for number in range(6)]
    down = [{"time", *skips[: number + 1]} for number in range(6)]
    left = [5, 4, 4, 3, 2, 2, 1, 0]  # skips after each block of the way up: two levels end with an upsampling
    up = [{"x", "time", *skips[:number]} for number in left]
    up[-1] = {"x"}
    assert handed == [*down, {"x", "time", *skips}, {"x", "time", *skips}, *up, {"loss"}]


def test_noise_goes_from_almost_none_to_almost_all() -> None:
    model, data = UNet(CONFIGS["tiny"]), batch(CONFIGS["tiny"])
    mixed = model.mix(**data)
    assert (mixed[0] - data["images"][0]).abs().max() < 0.05
    assert (mixed[2] - data["noise"][2]).abs().max() < 0.05
    assert noise_added(CONFIGS["tiny"])[[0, -1]].tolist() == [1e-4, 0.02]


def test_the_loss_is_the_mean_over_all_elements() -> None:
    prediction, target = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    expected = torch.nn.functional.mse_loss(prediction, target)
    torch.testing.assert_close(MeanSquaredError()(prediction, target), expected)


def test_initial_values_have_the_variance_of_torch_s_layers() -> None:
    torch.manual_seed(0)
    model = build("unet-small")
    for name, parameter in model.named_parameters():
        start = model.initial(name)
        if parameter.dim() == 1:
            assert start == Constant(0.0 if name.endswith("bias") else 1.0)
        else:
            assert isinstance(start, Normal)
            assert float(parameter.detach().std()) == pytest.approx(start.std, rel=0.05)


@pytest.mark.long  # examples/diffusion.py, which a test runs, trains one too
def test_a_unet_learns_what_it_is_shown() -> None:
    torch.manual_seed(0)
    model, data = UNet(CONFIGS["tiny"]), batch(CONFIGS["tiny"])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(30):
        loss = model(**data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_weights_of_another_unet_are_refused_with_what_differs(tmp_path: Path) -> None:
    save_weights(UNet(CONFIGS["tiny"]), tmp_path / "weights.safetensors")
    check_weights(tmp_path / "weights.safetensors", UNet(CONFIGS["tiny"]))
    with pytest.raises(UserError, match=r"written from a UNet with res_blocks 1\)$"):
        check_weights(tmp_path / "weights.safetensors", UNet(replace(CONFIGS["tiny"], res_blocks=2)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": (True,)}, "attention is given for 1 levels, but multipliers for 3"),
        ({"image": 18}, "an image of 18 pixels cannot be halved 2 times"),
        ({"groups": 5}, "5 groups do not divide the number of channels 24; the nearest that do: 4 or 6"),
        ({"head_dim": 7}, "7 channels of a head do not divide the number of channels 48; the nearest that do: 6 or 8"),
        ({"channels": 9, "groups": 1}, "do not divide the sinusoids of a time 9"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(CONFIGS["tiny"], **changes)
