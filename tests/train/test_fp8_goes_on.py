"""A training in FP8 goes on from a checkpoint as if it had not stopped, on another grid too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import job

import cubeloom
from cubeloom import Grid, UserError, parallelize
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import build, config
from cubeloom.parallel import ShardingPolicy, initial_values
from cubeloom.train.job import Job, check
from cubeloom.train.job.settings import LayoutSettings, ModelSettings, ScheduleSettings
from cubeloom.train.trainer import Trainer

pytestmark = pytest.mark.timeout(120)

FP8 = LayoutSettings(precision="fp8")


def losses(what: Job, steps: int) -> list[float]:
    """Of so many steps, from the newest checkpoint on; leaves one at the end."""
    trainer = Trainer(what, Network(what.grid))
    found = [trainer.step().loss for _ in range(steps)]
    trainer.save()
    trainer.close()
    return found


@pytest.mark.slow
def test_any_grid_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    whole = job(tmp_path / "whole", layout=FP8)
    (expected,) = ranks.run(1, losses, whole, 6)
    plain = ranks.run(1, losses, job(tmp_path / "plain"), 6)[0]
    assert expected[0] == plain[0] and all(abs(a - b) > 1e-9 for a, b in zip(expected[1:], plain[1:], strict=True))
    first = job(tmp_path / "cut", layout=FP8)
    found = ranks.run(1, losses, first, 3)[0]
    onto = replace(first, grid=Grid.parse("pipe=2,z=2"), schedule=ScheduleSettings(name="chimera", microbatches=4))
    found += ranks.run(4, losses, onto, 3)[0]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-10


def test_a_model_whose_cut_is_found_is_refused(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "nano_gpt.py"
    with pytest.raises(UserError, match='and precision = "fp8" is for those that have one'):
        check(job(tmp_path, layout=FP8, model=ModelSettings(name=f"{example}:build")))


def _parallelize_traced() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    rest = ShardingPolicy(precision="fp8")
    parallelize(model, Network(Grid()), example={"input": torch.zeros(2, 8)}, rest=rest)


def test_a_traced_model_in_a_loop_of_one_s_own_is_refused(ranks: RankPool) -> None:
    with pytest.raises(UserError, match="this one is found by tracing"):
        ranks.run(1, _parallelize_traced)


def own_loop(grid: str, folder: Path, steps: int) -> list[float]:
    """The losses of so many steps of a user's own loop, from the newest checkpoint on; leaves one at the end."""
    network = Network(Grid.parse(grid))
    with torch.device("meta"):
        model = build(config("gpt-tiny"))
    fill = initial_values(model, 0, torch.float64)
    parallelize(model, network, fill=fill, rest=ShardingPolicy(precision="fp8"), batch=(4, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = cubeloom.load(model, folder, optimizer=optimizer) if folder.exists() else 0
    losses = []
    for step in range(done, done + steps):
        tokens = (torch.arange(32).view(4, 8) * (step + 3)) % 64
        mine = network.share(tokens)
        loss = model(tokens=mine, targets=mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    cubeloom.save(model, folder, optimizer=optimizer)
    return losses


def test_a_loop_of_one_s_own(ranks: RankPool, tmp_path: Path) -> None:
    (expected,) = ranks.run(1, own_loop, "x=1", tmp_path / "whole", 4)
    found = ranks.run(2, own_loop, "y=2", tmp_path / "cut", 2)[0]
    found += ranks.run(2, own_loop, "x=2", tmp_path / "cut", 2)[1]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-10
