"""BatchNorm and GroupNorm of traced models: statistics are those of the whole batch, whatever cuts samples and features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.specs import TracedChannelNormSpec, WholeSpec
from cubeloom.parallel.traced import trace
from cubeloom.parallel.traced.known import known
from grids import rest_is_long

from .parity import Difference, compare

IMAGES = torch.linspace(-3, 3, 4 * 4 * 6 * 6, dtype=torch.float64).sin().view(4, 4, 6, 6)


class NormAct(nn.BatchNorm2d):
    """With an activation behind it, as image models often have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu_()


class Mixing(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(1, keepdim=True)


class Norms(nn.Module):
    """On x=2,y=2 the groups of one are whole on each rank, those of the other are not."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.wide, self.narrow = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4, momentum=0.3), NormAct(4), nn.GroupNorm(4, 4)])
        self.of_two = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.functional.silu(norm(convolution(x)))
        return self.narrow(self.of_two(self.wide(x))).square().mean()


def norms() -> nn.Module:
    torch.manual_seed(0)
    return Norms().double()


def loss_of(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = module(**batch)
    return found


def step(grid: Grid) -> Difference:
    return compare(Network(grid), norms(), {"x": IMAGES}, loss_of)


@pytest.mark.slow
@pytest.mark.parametrize("grid", rest_is_long(["y=2,z=2", "x=2,y=2", "data=2,z=2"], ["y=2,z=2"]))
def test_norms_of_images_on_a_grid(grid: str, ranks: RankPool) -> None:
    where = Grid.parse(grid)
    for difference in ranks.run(where.world, step, where):
        difference.check(grid)
        assert difference.buffers < 1e-12  # running statistics


def test_norms_lie_as_the_features_do() -> None:
    specs = {spec.name: spec for spec in trace(norms(), Grid(x=2, y=2), {"x": IMAGES}).specs}
    batch, group = specs["norms.0"], specs["of_two"]
    assert isinstance(batch, TracedChannelNormSpec) and batch.axes == ("y", "x") and batch.remembers
    assert isinstance(group, TracedChannelNormSpec) and group.groups == 2
    assert not any(isinstance(spec, WholeSpec) for spec in specs.values())


def test_what_a_norm_of_somebody_does_behind_it() -> None:
    assert known(NormAct(4)) == known(nn.BatchNorm2d(4))
    assert known(Mixing(4)) is None


def test_batch_norm_that_is_no_layer_is_refused() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.batch_norm(x, None, None, training=True).square().mean()

    with pytest.raises(UserError, match="would have the statistics of its own samples"):
        trace(nn.Sequential(nn.Conv2d(4, 4, 1), Mean()), Grid(z=2), {"input": IMAGES.float()})


class ChannelsLast(nn.Module):
    """torch gives the gradient of its weight in the order of its input's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.convolution(x.contiguous(memory_format=torch.channels_last))
        return y.square().mean()


def strides(grid: Grid) -> tuple[bool, bool]:
    network, module = Network(grid), ChannelsLast().double()
    module(IMAGES).backward()
    assert module.convolution.weight.grad is not None
    plain = torch.autograd.grad(module(IMAGES), module.convolution.weight)[0]
    trace(module, grid, {"x": IMAGES}).apply(module, network)
    module(IMAGES).backward()
    weight = module.get_parameter("convolution.weight")
    assert weight.grad is not None
    return plain.is_contiguous(), local_of(weight.grad).is_contiguous()


def test_gradients_lie_in_memory_as_their_parameters(ranks: RankPool) -> None:
    """Fused optimizers read both as they lie."""
    assert ranks.run(1, strides, Grid()) == [(False, True)]
