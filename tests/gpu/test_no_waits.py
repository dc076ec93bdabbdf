"""In a steady step the host never waits for the GPU: torch raises an error where it would, and no trace has such a call."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from cubeloom import Grid
from cubeloom.comm import Network, devices
from cubeloom.models import GPTConfig, build, cut_of
from cubeloom.parallel import Batch, ShardingPolicy, apply, initial_values
from cubeloom.parallel.weave import Weave
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.recorded import GraphRecord
from cubeloom.train.job import Job
from cubeloom.train.job.settings import LayoutSettings, ModelSettings, OptimizerSettings, ScheduleSettings
from cubeloom.train.trainer import Trainer
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU
SMALL = GPTConfig(vocab=96, positions=16, hidden=64, layers=8, heads=4)


def _steps_without_waits(step: Callable[[], Any], network: Network, folder: Path) -> None:
    for _ in range(3):
        step()
    devices.settle(network.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert _waits(_trace(step, network, folder)) == []


def _trace(step: Callable[[], Any], network: Network, folder: Path) -> list[dict[str, Any]]:
    devices.settle(network.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function("steady step"):
            step()
        devices.settle(network.device)
    trace = folder / f"{network.rank}.json"
    profiler.export_chrome_trace(str(trace))
    found: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return found


def _waits(events: list[dict[str, Any]]) -> list[str]:
    """Calls within the step, of any thread, that wait for the GPU; and copies to or from memory that may be paged, which do."""
    (step,) = [each for each in events if each["name"] == "steady step" and each.get("cat") == "user_annotation"]
    calls = [
        each["name"]
        for each in events
        if each.get("cat") in ("cuda_runtime", "cuda_driver")
        and step["ts"] <= each["ts"] + each.get("dur", 0)
        and each["ts"] <= step["ts"] + step["dur"]
    ]
    copies = [each["name"] for each in events if each.get("cat") == "gpu_memcpy"]
    assert any("Launch" in call for call in calls), "the trace has no kernels"
    found = [call for call in calls if "Synchronize" in call or call in ("cudaMalloc", "cudaFree", "cudaMemcpy")]
    return sorted({*found, *(copy for copy in copies if "DtoH" in copy or "Pageable" in copy)})


def _parts(grid: str) -> tuple[torch.nn.Module, Network, Any, dict[str, torch.Tensor]]:
    network = Network(Grid.parse(grid), devices.current("cuda"))
    with torch.device("meta"):
        model = build(SMALL)
    tokens = torch.randint(96, (8, 12), device=network.device)
    return (
        model,
        network,
        initial_values(model, 0, torch.bfloat16, network.device),
        {"tokens": tokens, "targets": tokens},
    )


def _pipeline(name: str, recorded: bool, folder: Path) -> None:
    model, network, fill, data = _parts("pipe=4")
    record = GraphRecord() if recorded else None
    pipeline = Pipeline(model, cut_of(model), network, Batch(8, 12), fill, generate(name, 4, 8), record=record)

    def step() -> None:
        pipeline.launch(data)
        for parameter in pipeline.parameters.values():
            parameter.grad = None

    _steps_without_waits(step, network, folder)


def _cube(grid: str, ways: int, rest: ShardingPolicy, folder: Path) -> None:
    model, network, fill, data = _parts(grid)
    state = apply(model, cut_of(model), network, Batch(8 // ways, 12), fill, rest)
    run = Weave(model, ways, state.staggers)
    mine = {name: network.share(tensor) for name, tensor in data.items()}

    def step() -> None:
        run(**mine).backward()
        for parameter in model.parameters():
            parameter.grad = None

    _steps_without_waits(step, network, folder)


def _training(job: Job) -> None:
    network = Network(job.grid, devices.current("cuda"), num_comm_channels=2)
    trainer = Trainer(job, network)
    _steps_without_waits(trainer.launch, network, job.folder)
    trainer.close()


def _steps_that_wait(folder: Path) -> None:
    network = Network(Grid(), devices.current("cuda"))
    tensor, here = torch.ones(1 << 20, device=network.device), torch.ones(1 << 20)
    found = [
        _waits(_trace(step, network, folder))
        for step in (lambda: tensor.sum().item(), lambda: tensor.add_(here.to(network.device)), tensor.sum)
    ]
    assert [bool(waits) for waits in found] == [True, True, False], found


def test_waits_are_seen(gpu_ranks: GpuRanks, tmp_path: Path) -> None:
    gpu_ranks(4).run(1, _steps_that_wait, tmp_path)


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("name", ["1f1b", "chimera-zb"])
def test_pipeline(gpu_ranks: GpuRanks, tmp_path: Path, name: str, recorded: bool) -> None:
    gpu_ranks(4).run(4, _pipeline, name, recorded, tmp_path, timeout=200)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("grid", ["x=2,y=2", "y=2,z=2"])
@pytest.mark.parametrize(
    "rest", [ShardingPolicy(), ShardingPolicy(activations="replicated")], ids=["sharded", "replicated"]
)
def test_cube(gpu_ranks: GpuRanks, tmp_path: Path, grid: str, ways: int, rest: ShardingPolicy) -> None:
    gpu_ranks(4).run(4, _cube, grid, ways, rest, tmp_path, timeout=200)


@pytest.mark.parametrize(
    ("grid", "schedule", "microbatches", "layout", "optimizer"),
    [
        ("x=1", "1f1b", 1, LayoutSettings(record=True), OptimizerSettings(fp32_master_weights=False)),
        ("pipe=2,data=2", "chimera-zb", 4, LayoutSettings(), OptimizerSettings(shard_optimizer_state=True)),
        ("x=2,z=2", "1f1b", 1, LayoutSettings(ways=2), OptimizerSettings(name="sgd")),
    ],
    ids=["alone", "pipeline", "cube"],
)
def test_training(
    gpu_ranks: GpuRanks,
    tmp_path: Path,
    grid: str,
    schedule: str,
    microbatches: int,
    layout: LayoutSettings,
    optimizer: OptimizerSettings,
) -> None:
    """With clipping, the guard and the update, until the loss is read."""
    job = Job(
        folder=tmp_path,
        device="cuda",
        dtype="bfloat16",
        model=ModelSettings(preset="gpt-tiny", vocab=96, positions=16, hidden=64, layers=4, heads=4),
        batch=Batch(8, 12),
        grid=Grid.parse(grid),
        schedule=ScheduleSettings(name=schedule, microbatches=microbatches),
        layout=layout,
        optimizer=optimizer,
    )
    gpu_ranks(4).run(job.grid.world, _training, job, timeout=200)
