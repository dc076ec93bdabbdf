"""A head and its loss in one under a GPU's autocast, which widens softmax: its products must not see that."""

from __future__ import annotations

import pytest
import torch

from cubeloom import Grid
from cubeloom.comm import Network, devices
from cubeloom.models import GPTConfig, build, cut_of
from cubeloom.parallel import Batch, apply, initial_values
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU
GPT = GPTConfig(vocab=96, positions=16, hidden=64, layers=2, heads=4)


def losses(grid: Grid) -> tuple[float, float, float, float]:
    """Loss and norm of the gradients: of the fused head, and of a head and then the loss."""
    network = Network(grid, devices.current("cuda"))
    tokens = torch.arange(64, device=network.device).view(4, 16) % 96
    found = []
    for apart in (False, True):
        with torch.device("meta"):
            model = build(GPT)
        apply(model, cut_of(model), network, Batch(4, 16), initial_values(model, 0, torch.float32, network.device))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model.loss(model(tokens), tokens.flatten()) if apart else model(tokens, tokens)
        loss.backward()
        norm = sum(each.grad.full_tensor().square().sum().item() for each in model.parameters())  # type: ignore[union-attr]
        found += [loss.item(), norm**0.5]
    return tuple(found)


@pytest.mark.parametrize("grid", ["x=1", "y=2"])
def test_a_head_and_its_loss_in_one(gpu_ranks: GpuRanks, grid: str) -> None:
    where = Grid.parse(grid)
    for loss, norm, apart, wanted in gpu_ranks(where.world).run(where.world, losses, where):
        assert loss == pytest.approx(apart, rel=1e-2) and norm == pytest.approx(wanted, rel=2e-2)
