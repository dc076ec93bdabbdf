"""The planner's peak of tensor memory against that of the true program, rehearsed: models of usual proportions, no values."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import pytest
import torch

from cubeloom.base.grid import Grid
from cubeloom.models import Config, GPTConfig, LlamaConfig, OurModel
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.parallel.config import WEIGHTS, ParallelConfig
from cubeloom.plan.cost_model.peak import memory
from cubeloom.plan.cost_model.recompute import Recompute
from cubeloom.plan.cost_model.schedules import ALONE, SHAPES
from cubeloom.plan.cost_model.worker_load import carry, loads
from cubeloom.plan.hardware import cluster
from cubeloom.plan.hardware.software import Software
from cubeloom.plan.model import Model
from cubeloom.plan.model.derive import derive
from cubeloom.plan.search.find import cost
from cubeloom.plan.search.space import AXES
from cubeloom.plan.simulate import schedule_of
from cubeloom.tools.rehearse import rehearse
from cubeloom.tools.verify import Experiment
from grids import rest_is_long

pytestmark = pytest.mark.timeout(300)

BY_TITLE = {shape.title: shape for shape in SHAPES}
SEQUENCE = 512
MODELS: dict[str, Config] = {
    "gpt": GPTConfig(vocab=16384, positions=1024, hidden=1024, layers=2, heads=16),
    "llama": LlamaConfig(vocab=16384, positions=1024, hidden=1024, layers=2, heads=16, kv_heads=8, mlp_hidden=2816),
    "long": GPTConfig(vocab=2048, positions=1024, hidden=2048, layers=6, heads=16),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    grid: str = "x=1"
    model: str = "gpt"
    shape: str | None = None
    count: int = 1
    samples: int = 2  # of a micro-batch, on one rank of data and z
    rest: ShardingPolicy = field(default_factory=ShardingPolicy)
    ways: int = 1
    recompute: Recompute = False
    dtype: torch.dtype = torch.bfloat16
    fp32_master_weights: bool = True
    moments: Literal["bfloat16"] | None = None
    offload: bool = False

    def __str__(self) -> str:
        rest = f"{self.rest.activations}/{self.rest.weights}/{self.rest.inputs}"
        end = f"{f'-again-{self.recompute}' if self.recompute else ''}-{self.dtype.itemsize}"
        end += f"{'' if self.fp32_master_weights else '-alone'}{'' if self.moments is None else '-rounded'}"
        end += "-hosted" * self.offload
        return f"{self.model}-{self.grid}-{self.shape}-{self.count}x{self.samples}-{rest}-{self.ways}{end}"


@cache
def layers(name: str) -> Model:
    return derive(name, OurModel(MODELS[name]))


def predicted(case: Case) -> float:
    """Of the worker that needs most."""
    g, model, shape, item = Grid.parse(case.grid), layers(case.model), shape_of(case), case.dtype.itemsize
    s = ParallelConfig(
        data=float(g.data), z=float(g.z), y=float(g.y), x=float(g.x), samples=float(case.samples * g.data * g.z),
        sequence=SEQUENCE, sharded=case.rest.activations == "sharded", weights=WEIGHTS.index(case.rest.weights),
        regathered=case.rest.inputs == "regathered", ways=float(case.ways), item=item, rank_stride=dict.fromkeys(AXES, 1.0),
    )  # fmt: skip
    held = loads(model, shape, g.pipe)
    software = Software(
        fp32_master_weights=case.fp32_master_weights, moments=2 if case.moments else None, offload=case.offload
    )
    carried = carry(held, cost(model, s, cluster("perlmutter"), "bf16"))
    return max(
        float(memory(shape, g.pipe, load.first, float(case.count), each, item, case.recompute, software).total)
        for load, each in zip(held, carried, strict=True)
    )


def shape_of(case: Case) -> Any:
    return ALONE if case.shape is None else BY_TITLE[case.shape]


def rehearsed(case: Case) -> int:
    grid = Grid.parse(case.grid)
    experiment = Experiment(
        model=OurModel(MODELS[case.model]), grid=grid, batch=Batch(case.samples * case.count * grid.z * grid.data, SEQUENCE),
        rest=case.rest, steps=2, dtype=case.dtype, schedule=schedule_of(shape_of(case), grid.pipe, case.count),
        recompute=case.recompute, zero=True, ways=case.ways, fp32_master_weights=case.fp32_master_weights, moments=case.moments,
        offload=case.offload,
    )  # fmt: skip
    return rehearse(experiment).chosen.memory.peak


SHORT = [
    Case(),
    Case(grid="z=2,y=2,x=2"),
    Case(grid="z=4", rest=ShardingPolicy(weights="kept"), ways=2),
    Case(grid="y=2", count=3, recompute=True),
    Case(grid="pipe=2", model="long", shape="zb-h1", count=4),
    Case(moments="bfloat16"),
    Case(offload=True, samples=1),
]
CASES = [
    *SHORT,
    Case(grid="z=4", model="long", recompute=True),
    Case(grid="y=2", dtype=torch.float32),
    Case(grid="z=2,y=2,x=2", moments="bfloat16"),
    Case(dtype=torch.float32, moments="bfloat16"),
    Case(fp32_master_weights=False, moments="bfloat16"),
    Case(grid="z=2,y=2,x=2", offload=True),
    Case(grid="y=2", dtype=torch.float32, offload=True),
    Case(grid="data=2"),
    Case(grid="y=2", model="llama", recompute="attention"),
    Case(grid="x=2", model="llama"),
    Case(grid="pipe=2", model="long", shape="gems", count=4),
    Case(grid="pipe=2", model="long", shape="chimera direct", count=4),
]


def every_schedule() -> list[Case]:
    """With twice as many micro-batches as workers; as many, where a search would weigh no more."""
    return [
        Case(grid=grid, model="long", shape=title, count=2 * d if shape.legal(d, 2 * d) else d)
        for d, grid in ((2, "pipe=2"), (4, "pipe=4,y=2"))
        for title, shape in BY_TITLE.items()
        if (shape.pairs or 1) <= d // 2
    ] + [
        Case(grid="pipe=2,z=2", model="long", shape=title, count=4, recompute=True)
        for title in ("1f1b", "chimera direct")
    ]


def some_of_all() -> list[Case]:
    """Without a pipeline, everything mixed."""
    draw = random.Random(7)
    grids = ("x=1", "y=4", "z=4", "data=4", "y=2,x=2", "z=2,x=2", "data=2,z=2", "z=2,y=2,x=2", "data=2,x=2")
    return [
        Case(
            grid=draw.choice(grids),
            model=draw.choice(("gpt", "llama")),
            count=draw.choice((1, 1, 2, 4)),
            samples=draw.choice((2, 4, 16)),
            rest=ShardingPolicy(
                activations=draw.choice(("sharded", "replicated")),
                weights=draw.choice(("freed", "kept", "replicated")),
                inputs=draw.choice(("kept", "regathered")),
            ),
            ways=draw.choice((1, 2)),
            recompute=draw.random() < 0.3,
            dtype=draw.choice((torch.bfloat16, torch.float32)),
        )
        for _ in range(40)
    ]


@pytest.mark.parametrize("case", rest_is_long(CASES, SHORT), ids=str)
def test_the_peak_is_within_one_percent(case: Case) -> None:
    assert predicted(case) == pytest.approx(rehearsed(case), rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("case", every_schedule(), ids=str)
def test_the_peak_of_every_schedule(case: Case) -> None:
    """Room is given that is not always needed: for whole micro-batches where they are halved, and for a weight's gradient
    beside the sum that it is added to, which from the second micro-batch on is the matmul's own."""
    assert 0.99 <= predicted(case) / rehearsed(case) <= 1.03


@pytest.mark.long
@pytest.mark.parametrize("case", some_of_all(), ids=str)
def test_the_peak_of_mixed_settings(case: Case) -> None:
    """With two strands what waits while the other computes is guessed: docs/plan.md says how far it was off."""
    least, most = (0.98, 1.02) if case.ways == 1 else (0.93, 1.18)
    assert least <= predicted(case) / rehearsed(case) <= most
