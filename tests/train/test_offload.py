"""Optimizer state in the host's memory: the same curve, bit for bit, and less memory of the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jobs import job
from torch import Tensor
from whole import tensors

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, OurModel
from cubeloom.parallel import Batch
from cubeloom.parallel.parameter import distribute
from cubeloom.tools.rehearse import Memory, rehearse
from cubeloom.tools.verify import Experiment
from cubeloom.train import BlockOptimizer
from cubeloom.train.job import Job
from cubeloom.train.job.settings import GuardSettings, OptimizerSettings
from cubeloom.train.loop import train
from cubeloom.train.optimizers import build_optimizer, locate
from on_a_gpu import NEEDS_GPU, GpuRanks

CASES = {
    "masters": ("bfloat16", OptimizerSettings()),
    "rounded": ("bfloat16", OptimizerSettings(moments="bfloat16")),
    "alone": ("bfloat16", OptimizerSettings(moments="bfloat16", fp32_master_weights=False)),
    "float32": ("float32", OptimizerSettings()),
    "sgd": ("float32", OptimizerSettings(name="sgd")),
}


def stepped(dtype: str, settings: OptimizerSettings, kind: str) -> list[list[Tensor]]:
    """Weights, masters and state after each of four steps, the second of which is forbidden."""
    device = torch.device(kind)
    network = Network(Grid(), device)
    values = torch.linspace(-1, 1, 6000, device=device).to(getattr(torch, dtype))
    shapes = ((20, 100), (1000,), (30, 50), (1500,))
    blocks = zip(values.split([2000, 1000, 1500, 1500]), shapes, strict=True)
    parameters = {
        str(number): distribute(network, block.clone().view(shape), shape, {})
        for number, (block, shape) in enumerate(blocks)
    }
    made = BlockOptimizer(
        parameters.values(),
        lambda parts: build_optimizer(settings, parts),
        settings.fp32_master_weights,
        settings.offload,
    )
    locate(made, parameters, network)
    found = []
    for step in range(4):
        for number, each in enumerate(parameters.values()):
            if (step, number) != (2, 1):  # one has no gradient for once
                wide = torch.full_like(each, 0.1 + step, dtype=each.grad_dtype or each.dtype)
                each.grad = wide
        made.optimizer.found_inf = torch.tensor(float(step == 1), device=device)  # type: ignore[attr-defined]
        made.optimizer.grad_scale = torch.tensor(2.0, device=device)  # type: ignore[attr-defined]
        made.step()
        made.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        kept = [made.optimizer.state[part.tensor] for part in made.parts.values()]
        state = [value for each in kept for _, value in sorted(each.items())]
        parts = [part.values.detach() for part in made.parts.values()]
        found.append([each.cpu().clone() for each in (*(part.block for part in made.parts.values()), *parts, *state)])
    if settings.offload:
        assert all(part.home is None or not part.tensor.untyped_storage().nbytes() > 8 for part in made.parts.values())
    return found


def alike(run: Callable[[str, OptimizerSettings], list[list[Tensor]]], name: str) -> None:
    dtype, settings = CASES[name]
    usual, offloaded = run(dtype, settings), run(dtype, replace(settings, offload=True))
    for mine, theirs in zip(offloaded, usual, strict=True):
        assert len(mine) == len(theirs) > 8 and all(map(torch.equal, mine, theirs))
    assert all(map(torch.equal, usual[0], usual[1])) and not torch.equal(usual[1][0], usual[2][0])


@pytest.mark.parametrize("name", CASES)
def test_updates_are_the_same_bit_for_bit(ranks: RankPool, name: str) -> None:
    alike(lambda dtype, settings: ranks.run(1, stepped, dtype, settings, "cpu")[0], name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS_GPU) for name in CASES])
def test_updates_on_a_gpu_are_too(gpu_ranks: GpuRanks, name: str) -> None:
    alike(lambda dtype, settings: gpu_ranks(4).run(1, stepped, dtype, settings, "cuda")[0], name)


def held_on_a_gpu(offload: bool) -> tuple[int, int]:
    """Bytes that sixteen parts of 16 MiB with their masters and moments take: at rest, and at most in a step."""
    device = torch.device("cuda")
    network = Network(Grid(), device)
    settings = OptimizerSettings(offload=offload)
    blocks = [torch.zeros(1 << 11, 1 << 11, dtype=torch.bfloat16, device=device) for _ in range(16)]
    parameters = [distribute(network, block, (1 << 11, 1 << 11), {}) for block in blocks]
    made = BlockOptimizer(parameters, lambda parts: build_optimizer(settings, parts), True, offload)
    for _ in range(2):
        for each in parameters:
            each.grad = torch.ones_like(each, dtype=torch.float32)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made.step()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - before
        made.zero_grad()
    return torch.cuda.memory_allocated(), most


@pytest.mark.parametrize("_", [pytest.param(None, marks=NEEDS_GPU)])
def test_at_most_two_parts_are_on_a_gpu(gpu_ranks: GpuRanks, _: None) -> None:
    part = 3 * 4 * (1 << 22)
    rest, most = gpu_ranks(4).run(1, held_on_a_gpu, True)[0]
    usual, _unused = gpu_ranks(4).run(1, held_on_a_gpu, False)[0]
    assert usual - rest >= 16 * part
    assert most <= 2 * part + (1 << 22)


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "schedule"), [("pipe=2,data=2", "chimera")])
def test_the_curve_is_the_same_and_goes_on_with_either(
    ranks: RankPool, tmp_path: Path, grid: str, schedule: str
) -> None:
    settings = OptimizerSettings(shard_optimizer_state=True)
    made = job(tmp_path / "usual", grid, schedule, 4, dtype="bfloat16", optimizer=settings, guard=GuardSettings())
    usual = trained(ranks, made)
    hosted = replace(settings, offload=True)
    offloaded = replace(made, folder=tmp_path / "offloaded", optimizer=hosted)
    same(trained(ranks, offloaded), usual)
    longer = replace(offloaded, steps=8)
    on_the_device = replace(longer, folder=tmp_path / "usual", optimizer=settings)
    same(trained(ranks, longer), trained(ranks, on_the_device))


def trained(ranks: RankPool, made: Job) -> dict[str, Tensor]:
    ranks.run(made.grid.world, train, made, timeout=100)
    return tensors(made.checkpoints)


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys() and any("master" in name for name in mine)
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


def memory(offload: bool) -> Memory:
    model = OurModel(GPTConfig(vocab=512, positions=64, hidden=128, layers=8, heads=4))
    experiment = Experiment(
        model=model, grid=Grid(y=2), batch=Batch(1, 16), dtype=torch.bfloat16, steps=2, offload=offload
    )
    return rehearse(experiment).chosen.memory


def test_a_rehearsal_knows_what_is_in_the_host_s_memory() -> None:
    usual, offloaded = memory(False), memory(True)
    states = offloaded.host
    assert states == pytest.approx(usual.at_peak["optimizer"], rel=0.01)
    largest = 12 * 512 * 128  # bytes of an MLP's weight, halved by y
    assert states - 2 * largest <= usual.peak - offloaded.peak <= states
