"""The norm of all gradients is the serial model's on every grid and schedule, and has the same bits on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.cube import Batch, apply, initial_values, materialise
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, build, cut_of
from cubeloom.pipeline import generate
from cubeloom.runtime import Pipeline
from cubeloom.train import ShardedOptimizer
from cubeloom.train.clipping import clip, norm, pieces

pytestmark = pytest.mark.timeout(60)

MODEL = GPTConfig(vocab=64, positions=8, hidden=16, layers=2, heads=4)
BATCH = Batch(8, 8)
TOKENS = torch.arange(64).view(8, 8)
MOST = 0.1


def serial() -> float:
    with torch.device("meta"):
        model = build(MODEL)
    materialise(model, initial_values(model, 0, torch.float64))
    model(tokens=TOKENS, targets=TOKENS).backward()
    return clip_grad_norm_(model.parameters(), MOST).item()


def norms(grid: Grid, schedule: str | None, zero: bool) -> tuple[float, float]:
    """Before clipping, and after."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(MODEL)
    fill = initial_values(model, 0, torch.float64)
    mine = network.share(TOKENS)
    if schedule is None:
        state = apply(model, cut_of(model), network, BATCH, fill)
        parameters, gradients, holders = dict(model.named_parameters()), state.gradients, None
        step: Callable[[], object] = partial(_step, model, mine)
    else:
        pipeline = Pipeline(model, cut_of(model), network, BATCH, fill, generate(schedule, grid.pipe, grid.pipe))
        parameters, gradients, holders = pipeline.parameters, pipeline.gradients, pipeline.layout.holders
        step = partial(pipeline.step, {"tokens": mine, "targets": mine})
    sharded = ShardedOptimizer(parameters.values(), gradients, torch.optim.AdamW) if zero else None
    step()
    found = pieces(parameters.items(), network, sharded, holders)
    return clip(found, network, MOST), norm(found, network)


def _step(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    model(tokens=tokens, targets=tokens).backward()


@pytest.mark.parametrize(
    ("grid", "schedule", "zero"),
    [
        ("x=2,y=2", None, False),
        ("z=2,data=2", None, False),
        ("z=2,data=2", None, True),
        ("pipe=2,data=2", "chimera", False),
        ("pipe=2,data=2", "chimera", True),
        ("pipe=4", "1f1b", False),
    ],
)
def test_the_norm_is_the_serial_model_s(ranks: RankPool, grid: str, schedule: str | None, zero: bool) -> None:
    (whole,) = ranks.run(1, serial)
    on = Grid.parse(grid)
    found = ranks.run(on.world, norms, on, schedule, zero)
    assert len(set(found)) == 1
    before, after = found[0]
    assert before == pytest.approx(whole, rel=1e-12)
    assert after == pytest.approx(MOST, rel=1e-12)
