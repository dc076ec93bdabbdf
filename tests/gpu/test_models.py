"""NCCL: every model trains as the serial one does, on eight ranks of one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cubeloom import Grid
from cubeloom.models import preset
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.tools.verify import Experiment, verify
from grids import MODELS, RESTS
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model(gpu_ranks: GpuRanks, model: str, rest: Any) -> None:
    single = Experiment(
        model=preset(model),
        grid=Grid(x=2, y=2, z=2),
        batch=Batch(4, 24),
        rest=ShardingPolicy(activations=rest),
        dtype=torch.float32,
    )
    report = verify(single, "cuda", pool=gpu_ranks(8))
    assert report.ok, (report.loss_diff, report.grad_diff, report.weight_diff, report.bytes_agree)
