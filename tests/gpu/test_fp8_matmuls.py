"""FP8 on a GPU: its own matmuls, on rounded operands that are gathered as bytes."""

from __future__ import annotations

import pytest
import torch

from cubeloom import Grid
from cubeloom.base import torch_private
from cubeloom.comm import devices
from cubeloom.models import OurModel, config
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.pipeline import generate
from cubeloom.tools.verify import Experiment, verify
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("left_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_the_rounded_operands(left_dtype: torch.dtype, dtype: torch.dtype) -> None:
    device = devices.use("cuda", 0)
    if not devices.multiplies_fp8(device):
        pytest.skip("this GPU has no FP8 matmuls")
    left, right = torch.randn(64, 128, device=device).to(left_dtype), torch.randn(96, 128, device=device)
    right = right.to(torch.float8_e4m3fn)
    factors = torch.tensor(0.5, device=device), torch.tensor(4.0, device=device)
    found = torch_private.scaled_product(left, right, factors, dtype, fast=False)
    torch.testing.assert_close(found.float(), 2 * left.float() @ right.float().t(), rtol=2e-2, atol=0.2)


@pytest.mark.parametrize(("grid", "microbatches"), [("x=2,y=2", 1), ("z=2", 1), ("pipe=2", 4)])
def test_a_grid_trains_as_the_serial_model(gpu_ranks: GpuRanks, grid: str, microbatches: int) -> None:
    """In float32; a product of a GPU sums in fewer bits than the reference, so only losses are compared closely."""
    on = Grid.parse(grid)
    experiment = Experiment(
        model=OurModel(config("gpt-tiny")),
        grid=on,
        batch=Batch(4, 16),
        dtype=torch.float32,
        rest=ShardingPolicy(precision="fp8"),
        schedule=generate("1f1b", on.pipe, microbatches) if on.pipe > 1 else None,
    )
    report = verify(experiment, "cuda", gpu_ranks(on.world))
    assert report.bytes_agree and report.replicas_agree
    assert report.loss_diff < 1e-2
