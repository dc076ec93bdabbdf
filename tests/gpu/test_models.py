"""The same on a GPU with NCCL; several ranks share one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cubeloom import Grid
from cubeloom.comm import devices
from cubeloom.cube import Batch, Rest
from cubeloom.launch import RankPool
from cubeloom.models import config
from cubeloom.verify import Experiment, verify
from grids import MODELS, RESTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not devices.available("cuda"), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[RankPool]:
    with RankPool(8, "cuda") as pool:
        yield pool


@pytest.mark.parametrize("grid", ["x=2", "y=2", "z=2", "x=2,y=2", "data=2,z=2", "x=2,y=2,z=2"])
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_on_one_gpu(gpu_ranks: RankPool, model: str, rest: Any, grid: str) -> None:
    on = Grid.parse(grid)
    single = Experiment(
        model=config(model),
        grid=on,
        batch=Batch(2 * on.data * on.z, 24),
        rest=Rest(activations=rest),
        dtype=torch.float32,
    )
    report = verify(single, "cuda", pool=gpu_ranks)
    assert report.ok, (report.loss_diff, report.grad_diff, report.weight_diff, report.bytes_agree)
