"""In a steady step the host never waits for the GPU: torch raises an error where it would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cubeloom import Grid
from cubeloom.comm import Network, devices
from cubeloom.cube import Batch, Rest, apply, initial_values
from cubeloom.models import GPTConfig, build, cut_of
from cubeloom.pipeline import generate
from cubeloom.runtime import Pipeline
from cubeloom.runtime.recorded import GraphRecord
from cubeloom.weave import Weave
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU
SMALL = GPTConfig(vocab=96, positions=16, hidden=64, layers=8, heads=4)


def _steps_without_waits(step: Callable[[], Any], device: torch.device) -> None:
    for _ in range(3):
        step()
    devices.settle(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    devices.settle(device)


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


def _pipeline(name: str, recorded: bool) -> None:
    model, network, fill, data = _parts("pipe=4")
    record = GraphRecord() if recorded else None
    pipeline = Pipeline(model, cut_of(model), network, Batch(8, 12), fill, generate(name, 4, 8), record=record)

    def step() -> None:
        pipeline.launch(data)
        for parameter in pipeline.parameters.values():
            parameter.grad = None

    _steps_without_waits(step, network.device)


def _cube(grid: str, ways: int, rest: Rest) -> None:
    model, network, fill, data = _parts(grid)
    state = apply(model, cut_of(model), network, Batch(8 // ways, 12), fill, rest)
    run = Weave(model, ways, state.staggers)
    mine = {name: network.share(tensor) for name, tensor in data.items()}

    def step() -> None:
        run(**mine).backward()
        for parameter in model.parameters():
            parameter.grad = None

    _steps_without_waits(step, network.device)


@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("name", ["1f1b", "chimera-zb"])
def test_pipeline(gpu_ranks: GpuRanks, name: str, recorded: bool) -> None:
    gpu_ranks(4).run(4, _pipeline, name, recorded, timeout=200)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("grid", ["x=2,y=2", "y=2,z=2"])
@pytest.mark.parametrize("rest", [Rest(), Rest(activations="replicated")], ids=["sharded", "replicated"])
def test_cube(gpu_ranks: GpuRanks, grid: str, ways: int, rest: Rest) -> None:
    gpu_ranks(4).run(4, _cube, grid, ways, rest, timeout=200)
