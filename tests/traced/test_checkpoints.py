"""Checkpoints of traced models: all of their state, or a refusal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import cubeloom
from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.train import BlockOptimizer
from cubeloom.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint

X = torch.linspace(-2, 3, 4 * 3 * 6 * 6, dtype=torch.float64).sin().view(4, 3, 6, 6)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 1)
        self.second.bias.requires_grad_(False)  # type: ignore[union-attr]
        self.register_buffer("made", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())


def trained(grid: Grid, folder: Path, parameters_alone: bool = False) -> list[float]:
    """What a model in evaluation gives: after some steps, and in a new model after a load."""
    network = Network(grid)
    found = []
    for loads in (False, True):
        torch.manual_seed(0)
        model, mine = Images().double(), network.share(X)
        cubeloom.parallelize(model, network, example={"x": mine})
        assert not model.second.bias.requires_grad and type(model.norm.running_mean) is Tensor  # type: ignore[union-attr]
        optimizer = BlockOptimizer(model.parameters(), partial(torch.optim.AdamW, lr=0.1))
        given = dict(model.named_parameters()) if parameters_alone else model
        if loads:
            assert load_checkpoint(checkpoints(folder)[-1], given, optimizer, network)[0] == 3
        else:
            for _ in range(3):
                model(mine).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert model.norm.num_batches_tracked == 3
            save_checkpoint(folder, 3, given, optimizer, network, {})
        assert model.norm.num_batches_tracked == 3
        model.eval()
        found.append(model(X).square().sum().item())
    return found


@pytest.mark.slow
def test_a_checkpoint_has_buffers_and_what_is_frozen(ranks: RankPool, tmp_path: Path) -> None:
    for before, after in ranks.run(2, trained, Grid(x=2), tmp_path):
        assert after == pytest.approx(before, rel=1e-12)


def test_parameters_without_the_buffers_of_their_model_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    told = r"checkpoint of Images without its buffer norm.running_mean \(and 2 more\) .* give the model itself"
    with pytest.raises(UserError, match=told):
        ranks.run(2, trained, Grid(x=2), tmp_path, True)
    assert not checkpoints(tmp_path)
