"""NCCL: the cube, the weave and the pipelines train as the serial model does, on 2, 4 and 8 ranks of one GPU.

Bytes are those predicted, replicas are equal to the last bit; losses, gradients and weights are compared as closely as the
numbers' digits allow. Of weights in bfloat16 nothing is said: where a gradient is zero but for its rounding AdamW makes of
that a whole update.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cubeloom import Grid
from cubeloom.models import GPTConfig, OurModel, config
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime.microbatches import portions
from cubeloom.tools.verify import Experiment, verify
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU
GPT = GPTConfig(vocab=96, positions=16, hidden=64, layers=8, heads=4)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
REPLICATED = ShardingPolicy(activations="replicated")


def trains_as_serial(gpu_ranks: GpuRanks, grid: Grid, dtype: torch.dtype, batch: Batch, **changes: Any) -> None:
    model = OurModel(changes.pop("model", GPT))
    experiment = Experiment(**{"model": model, "grid": grid, "batch": batch, "steps": 2, "dtype": dtype, **changes})
    report = verify(experiment, "cuda", pool=gpu_ranks(grid.world))
    if dtype is torch.bfloat16:
        assert report.loss_diff <= 0.02 and report.grad_diff <= 0.1, (report.loss_diff, report.grad_diff)
    else:
        assert report.ok, (report.loss_diff, report.grad_diff, report.weight_diff)
    assert report.bytes_agree, (report.counted, report.predicted)
    assert report.replicas_agree


@DTYPES
@pytest.mark.parametrize("grid", ["x=2", "z=2", "x=2,y=2", "data=2,z=2", "x=2,y=2,z=2"])
@pytest.mark.parametrize("rest", [ShardingPolicy(), REPLICATED], ids=["sharded", "replicated"])
def test_cube(gpu_ranks: GpuRanks, grid: str, rest: ShardingPolicy, dtype: torch.dtype) -> None:
    trains_as_serial(gpu_ranks, Grid.parse(grid), dtype, Batch(16, 12), rest=rest)


@DTYPES
@pytest.mark.parametrize("grid", ["x=2,y=2", "x=2,y=2,z=2"])
@pytest.mark.parametrize("rest", [ShardingPolicy(), REPLICATED], ids=["sharded", "replicated"])
def test_weave(gpu_ranks: GpuRanks, grid: str, rest: ShardingPolicy, dtype: torch.dtype) -> None:
    trains_as_serial(gpu_ranks, Grid.parse(grid), dtype, Batch(16, 12), rest=rest, ways=2)


@DTYPES
@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, d) for name in ("1f1b", "chimera-zb") for d in (2, 4, 8)] + [("zbv", 4), ("chimera", 4)],
)
def test_pipeline(gpu_ranks: GpuRanks, name: str, workers: int, dtype: torch.dtype) -> None:
    model = GPTConfig(vocab=96, positions=16, hidden=64, layers=16, heads=4)
    schedule = generate(name, workers, 2 * workers)
    batch = Batch(len(portions(schedule)), 12)
    trains_as_serial(gpu_ranks, Grid(pipe=workers), dtype, batch, model=model, schedule=schedule)


@DTYPES
@pytest.mark.parametrize("name", ["1f1b", "chimera-zb"])
def test_recorded_stages(gpu_ranks: GpuRanks, name: str, dtype: torch.dtype) -> None:
    schedule = generate(name, 4, 8)
    batch = Batch(len(portions(schedule)), 12)
    trains_as_serial(gpu_ranks, Grid(pipe=4), dtype, batch, schedule=schedule, record=True, steps=4)


@DTYPES
@pytest.mark.parametrize("name", ["1f1b", "chimera-zb"])
def test_compiled_and_recorded_stages(gpu_ranks: GpuRanks, name: str, dtype: torch.dtype) -> None:
    schedule = generate(name, 4, 4)
    batch = Batch(len(portions(schedule)), 12)
    trains_as_serial(gpu_ranks, Grid(pipe=4), dtype, batch, schedule=schedule, compile=True, record=True, steps=3)


@DTYPES
@pytest.mark.parametrize("grid", ["x=2,y=2", "z=2,y=2", "data=2,z=2", "pipe=2,y=2"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_recorded_collectives(gpu_ranks: GpuRanks, grid: str, dtype: torch.dtype, compiled: bool) -> None:
    on = Grid.parse(grid)
    schedule = generate("1f1b", on.pipe, 2)
    batch = Batch(2 * on.data * on.z, 12)
    trains_as_serial(gpu_ranks, on, dtype, batch, schedule=schedule, record=True, compile=compiled, steps=4)


@DTYPES
@pytest.mark.parametrize("grid", ["pipe=2,data=2", "pipe=2,x=2,y=2"])
def test_pipeline_of_cubes(gpu_ranks: GpuRanks, grid: str, dtype: torch.dtype) -> None:
    on = Grid.parse(grid)
    batch = Batch(4 * on.data * on.z, 12)
    trains_as_serial(gpu_ranks, on, dtype, batch, schedule=generate("chimera-zb", 2, 4), zero=True)


def test_images(gpu_ranks: GpuRanks) -> None:
    trains_as_serial(
        gpu_ranks, Grid.parse("x=2,y=2"), torch.float32, Batch(8, 1), model=config("unet-tiny"), rest=REPLICATED
    )
