"""A grid that pads a vocabulary or copies heads saves the tensors of the serial model, and goes on from anybody's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from whole import tensors

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import LanguageConfig, LlamaConfig, build, cut_of
from cubeloom.parallel import Batch, initial_values
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.train.checkpoint import (
    checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from cubeloom.train.job.settings import OptimizerSettings
from cubeloom.train.optimizers import optimizer_of
from grids import rest_is_long

pytestmark = pytest.mark.timeout(120)

ODD = LlamaConfig(vocab=23, positions=8, hidden=32, layers=2, heads=8, kv_heads=4, mlp_hidden=32)
TWO = LlamaConfig(vocab=23, positions=8, hidden=32, layers=2, heads=8, kv_heads=2, mlp_hidden=32, tied=True)
ONE = LlamaConfig(vocab=24, positions=8, hidden=32, layers=2, heads=8, kv_heads=1, mlp_hidden=32)
BATCH = Batch(8, 8)


@dataclass(frozen=True)
class On:
    """Where to train, and in which numbers."""

    grid: str
    zero: bool = False
    dtype: torch.dtype = torch.float64
    schedule: str = "1f1b"

    @property
    def world(self) -> int:
        return Grid.parse(self.grid).world


def train(model: LanguageConfig, on: On, folder: Path, first: int, last: int) -> list[float]:
    """Losses of the steps from `first` on; begins from the newest checkpoint if it begins late, and leaves one at the end."""
    grid = Grid.parse(on.grid)
    network = Network(grid)
    with torch.device("meta"):
        plain = build(model)
    fill = initial_values(plain, 0, on.dtype)
    pipeline = Pipeline(plain, cut_of(plain), network, BATCH, fill, generate(on.schedule, grid.pipe, 2))
    settings = OptimizerSettings(shard_optimizer_state=on.zero, weight_decay=0.1)
    optimizer = optimizer_of(settings, pipeline.parameters, pipeline.gradients, network)
    for group in optimizer.optimizer.param_groups:
        group["lr"], group["eps"] = 1e-2, 1e-6
    if first:
        load_checkpoint(checkpoints(folder)[-1], pipeline.parameters, optimizer, network)
    losses = []
    for step in range(first, last):
        tokens = network.share((torch.arange(64) * (step + 3)).view(8, 8) % model.vocab)
        losses.append(pipeline.step({"tokens": tokens, "targets": tokens}, step))
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, last, pipeline.parameters, optimizer, network, {})
    return losses


CASES = [
    (ODD, On("y=2,z=2")),
    (ODD, On("y=4,x=2")),
    (ODD, On("data=2,z=2", zero=True)),
    (ODD, On("pipe=2,y=2", schedule="chimera")),
    (ODD, On("pipe=2,data=2,y=2", zero=True)),
    (TWO, On("y=4,z=2")),
    (TWO, On("data=2,y=4,z=2", zero=True)),
    (TWO, On("pipe=2,y=4", schedule="chimera", zero=True)),
    (ONE, On("x=2,y=4,z=2")),
    (ONE, On("data=2,y=2", zero=True)),
]


@pytest.mark.parametrize(("model", "on"), rest_is_long(CASES, [CASES[6]]))
def test_saved_is_what_the_serial_model_saves(ranks: RankPool, tmp_path: Path, model: LanguageConfig, on: On) -> None:
    """Before the first update to the bit, and after some as nearly as sums agree."""
    alone, here = tmp_path / "alone", tmp_path / "here"
    for last in (0, 2):
        ranks.run(1, train, model, On("x=1"), alone, 0, last)
        ranks.run(on.world, train, model, on, here, 0, last)
        theirs, ours = tensors(alone), tensors(here)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.shape == theirs[name].shape and tensor.dtype == theirs[name].dtype
            if not last:
                assert torch.equal(tensor, theirs[name]), name
            assert torch.allclose(tensor, theirs[name], rtol=1e-9, atol=1e-10), name


@pytest.mark.parametrize(("model", "on"), rest_is_long(CASES, [CASES[4]]))
def test_training_goes_on_elsewhere(ranks: RankPool, tmp_path: Path, model: LanguageConfig, on: On) -> None:
    """From this grid to others, with other padding and other copies, and back to this one."""
    (whole,) = ranks.run(1, train, model, On("x=1"), tmp_path / "alone", 0, 4)
    ranks.run(on.world, train, model, on, tmp_path, 0, 1)
    found = [ranks.run(4, train, model, On("y=4"), tmp_path, 1, 2)[0]]
    found.append(ranks.run(on.world, train, model, on, tmp_path, 2, 3)[0])
    found.append(ranks.run(2, train, model, On("z=2"), tmp_path, 3, 4)[0])
    assert [loss for each in found for loss in each] == pytest.approx(whole[1:], rel=1e-10)


@pytest.mark.parametrize(
    ("model", "zero"), rest_is_long([(ODD, False), (TWO, True), (ODD, True), (TWO, False)], [(ODD, True)])
)
def test_masters_of_few_digits_too(ranks: RankPool, tmp_path: Path, model: LanguageConfig, zero: bool) -> None:
    """A save, a load on another grid and a save again are the same tensors, float32 masters among them."""
    here = On("data=2,y=4,z=2", zero, torch.bfloat16)
    ranks.run(16, train, model, here, tmp_path / "a", 0, 2)
    first = tensors(tmp_path / "a")
    assert first["optimizer/master/embed.weight"].shape == (23, 32)
    for on in (On("y=4", dtype=torch.bfloat16), On("z=2", dtype=torch.bfloat16)):
        ranks.run(on.world, train, model, on, tmp_path / "a", 2, 2)
        again = tensors(tmp_path / "a")
        assert again.keys() == first.keys()
        assert all(torch.equal(again[name], each) for name, each in first.items())
