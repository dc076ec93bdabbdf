"""NCCL: every model trains as the serial one does, on eight ranks of one GPU."""

from __future__ import annotations

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


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model(gpu_ranks: RankPool, model: str, rest: Any) -> None:
    single = Experiment(
        model=config(model),
        grid=Grid(x=2, y=2, z=2),
        batch=Batch(4, 24),
        rest=Rest(activations=rest),
        dtype=torch.float32,
    )
    report = verify(single, "cuda", pool=gpu_ranks)
    assert report.ok, (report.loss_diff, report.grad_diff, report.weight_diff, report.bytes_agree)
