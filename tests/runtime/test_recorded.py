"""Recorded stages train as others do. Here recordings call again what was recorded; on a GPU they are graphs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from cubeloom import Grid, UserError
from cubeloom.comm import Network, devices
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, build, cut_of
from cubeloom.parallel import Batch, ShardingPolicy, initial_values
from cubeloom.parallel.config import Precision
from cubeloom.parallel.fp8 import AmaxHistory
from cubeloom.parallel.gradients import Gradients
from cubeloom.parallel.parameter import local_of
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.recorded import Function, GraphRecord, Record, Recording
from cubeloom.pipeline.runtime.stage import Carry
from on_a_gpu import GpuRanks

pytestmark = pytest.mark.timeout(180)
SMALL: dict[str, Any] = {"vocab": 48, "positions": 16, "hidden": 16, "layers": 4, "heads": 2}
SCHEDULES = {name: generate(name, 2, 6) for name in ("1f1b", "zb-h1", "chimera-zb")}
SCHEDULES["once"] = generate("gpipe", 1, 1)  # one micro-batch, whose gradients are those of the step


class CallAgain:
    """As graphs do: inputs lie where they lay, and gradients that there were not when it was recorded are written anew."""

    def __init__(self) -> None:
        self.slots: dict[Hashable, list[Function]] = {}
        self.gradients = Gradients()  # those of the pipeline
        self.amax: AmaxHistory | None = None

    @contextmanager
    def measured_nothing(self) -> Iterator[None]:
        """A graph that is being recorded computes nothing."""
        now = None if self.amax is None else self.amax._now.clone()
        yield
        if self.amax is not None and now is not None:
            self.amax._now.copy_(now)

    def __call__(self, function: Function, given: tuple[Carry, ...], slot: Hashable) -> Recording:
        self.slots.setdefault(slot, []).append(function)
        still = tuple({name: tensor.clone() for name, tensor in each.items()} for each in given)
        before = self.gradients.sums()
        with self.measured_nothing():
            function(*still)
        written = {each: place for each, place in self.gradients.sums().items() if each not in before}

        def again(*values: Mapping[str, Tensor]) -> Carry:
            for held, new in zip(still, values, strict=True):
                for name, tensor in held.items():
                    tensor.detach().copy_(new[name])
            seen = self.gradients.sums()
            self.gradients.accumulate_in({each: place for each, place in seen.items() if each not in written})
            grads = {each: each.grad for each in written}
            for each in written:
                each.grad = None  # a graph does not see what an earlier step has left
            found = function(*still)
            for each, place in written.items():
                place.copy_(self.gradients.sums()[each])
                each.grad = grads[each]
            self.gradients.accumulate_in(seen)
            return found

        return again


def losses_and_weights(
    record: Record | None, name: str, kind: devices.Kind, cube: Grid, precision: Precision = "model"
) -> tuple[list[float], dict[str, Tensor], list[Fraction]]:
    """On this cube in each place of the pipeline, or on two replicas; and what each step received."""
    schedule = SCHEDULES[name]
    pipe = len(schedule.workers)
    grid = replace(cube, pipe=pipe, data=2 if cube.world == pipe == 1 else 1)
    network = Network(grid, devices.current(kind))
    dtype = torch.float64 if kind == devices.CPU else torch.float32
    with torch.device("meta"):
        model = build(GPTConfig(**SMALL))
    fill, rest = initial_values(model, 0, dtype, network.device), ShardingPolicy(precision=precision)
    pipeline = Pipeline(model, cut_of(model), network, Batch(6, 12), fill, schedule, rest, record=record)
    if isinstance(record, CallAgain):
        record.gradients, record.amax = pipeline.gradients, pipeline.amax
    numbers = torch.Generator().manual_seed(1)
    losses, received = [], []
    for step in range(4):
        tokens = torch.randint(48, (6, 13), generator=numbers)
        targets = tokens[:, 1:].clone()
        targets[: 1 + step % 3, :5] = -100  # micro-batches have other shares of the loss in every step
        data = {"tokens": tokens[:, :-1].contiguous(), "targets": targets}
        mine = network.grid.share(network.coordinates, 6)
        with network.recording() as ledger:
            losses.append(pipeline.step({name: tensor[mine].to(network.device) for name, tensor in data.items()}))
        received.append(sum(ledger.by_axis().values(), Fraction()))
        for parameter in pipeline.parameters.values():
            assert parameter.grad is not None
            local_of(parameter).sub_(local_of(parameter.grad), alpha=0.5)
            # In one step gradients are left, so that those of the next are added to them.
            if step != 2:
                parameter.grad = None
    return losses, {name: local_of(each).cpu() for name, each in pipeline.parameters.items()}, received


def _both(
    schedule: str, kind: devices.Kind, cube: Grid, precision: Precision = "model"
) -> tuple[float, float, list[str]]:
    """The largest differences of losses and weights; and what each slot recorded."""
    plain, weights, received = losses_and_weights(None, schedule, kind, cube, precision)
    record: Record = CallAgain() if kind == devices.CPU else GraphRecord()
    again, changed, once_more = losses_and_weights(record, schedule, kind, cube, precision)
    assert kind == devices.CPU or received == once_more  # what is called again counts itself
    worst = max(float((weights[name] - changed[name]).abs().max()) for name in weights)
    made = record.slots if isinstance(record, CallAgain) else {}
    actions = ["".join(function.args[0] for function in slot) for slot in made.values()]  # type: ignore[attr-defined]
    return max(abs(a - b) for a, b in zip(plain, again, strict=True)), worst, actions


@pytest.mark.parametrize(
    ("schedule", "first", "second"),
    [
        ("1f1b", ["FB"] * 2, ["FB"]),
        ("zb-h1", ["FIW"] * 2, ["FIW"] * 2),
        ("chimera-zb", None, None),
        ("once", ["FB"], ["FB"]),
    ],
)
def test_recorded_stages_train_alike(
    ranks: RankPool, schedule: str, first: list[str] | None, second: list[str] | None
) -> None:
    for (loss, weight, actions), slots in zip(
        ranks.run(2, _both, schedule, "cpu", Grid()), (first, second), strict=True
    ):
        assert loss <= 1e-12 and weight <= 1e-12
        assert set(actions) <= {"FB", "FIW"}  # each slot has one portion's actions, also where a worker has two stages
        assert slots is None or actions == slots


@pytest.mark.parametrize(("schedule", "cube"), [("once", "x=2,y=2"), ("once", "z=2"), ("1f1b", "y=2")])
def test_collectives_are_recorded_too(ranks: RankPool, schedule: str, cube: str) -> None:
    grid = Grid.parse(cube)
    for loss, weight, _ in ranks.run(grid.world * len(SCHEDULES[schedule].workers), _both, schedule, "cpu", grid):
        assert loss <= 1e-12 and weight <= 1e-12


@pytest.mark.parametrize(("schedule", "cube"), [("once", "x=2,z=2"), ("chimera-zb", "x=1")])
def test_scales_of_fp8_are_those_of_each_step(ranks: RankPool, schedule: str, cube: str) -> None:
    grid = Grid.parse(cube)
    world = grid.world * len(SCHEDULES[schedule].workers)
    for loss, weight, _ in ranks.run(world, _both, schedule, "cpu", grid, "fp8"):
        assert loss <= 1e-12 and weight <= 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not devices.available("cuda"), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("schedule", "cube"),
    [*((schedule, "x=1") for schedule in SCHEDULES), ("once", "x=2,y=2"), ("once", "z=2,y=2"), ("1f1b", "y=2")],
)
def test_graphs_train_alike(gpu_ranks: GpuRanks, schedule: str, cube: str) -> None:
    grid = Grid.parse(cube)
    world = max(2, grid.world * len(SCHEDULES[schedule].workers))
    for loss, weight, _ in gpu_ranks(world).run(world, _both, schedule, "cuda", grid, timeout=150):
        assert loss <= 1e-5 and weight <= 1e-5


def _refused(grid: str, changes: dict[str, Any]) -> str:
    with torch.device("meta"):
        model = build(GPTConfig(**SMALL, dropout=changes.pop("dropout", 0.0)))
    network = Network(Grid.parse(grid))
    fill = initial_values(model, 0, torch.float64, network.device)
    schedule = generate(changes.pop("schedule", "1f1b"), network.grid.pipe, 2)
    try:
        Pipeline(model, cut_of(model), network, Batch(4, 12), fill, schedule, record=CallAgain(), **changes)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("grid", "changes", "reason"),
    [
        ("pipe=2", {"dropout": 0.1}, "dropout draws other numbers"),
        ("pipe=2", {"schedule": "pipedream-2bw"}, "several versions of weights"),
        ("pipe=2", {"ways": 2}, "ways = 2"),
        ("pipe=2", {"recompute": True}, "recomputed"),
    ],
)
def test_what_cannot_be_recorded_is_refused(ranks: RankPool, grid: str, changes: dict[str, Any], reason: str) -> None:
    assert all(reason in said for said in ranks.run(2, _refused, grid, changes))
