"""Every synchronous schedule trains as the serial model does, bytes as predicted, replicas equal to the last bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from compiling import without_kernels
from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import BERTConfig, Config, GPTConfig, LlamaConfig, OurModel, build, cut_of
from cubeloom.parallel import Batch, ShardingPolicy, initial_values, weave
from cubeloom.parallel.parameter import local_of
from cubeloom.pipeline import Schedule, Sync, generate, synchronised
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.microbatches import portions
from cubeloom.pipeline.schedules import FAMILIES
from cubeloom.tools.verify import Experiment
from cubeloom.train import ShardedOptimizer
from grids import rest_is_long
from parity import holds
from serial_runs import Verified

pytestmark = pytest.mark.timeout(180)

# Enough for two chunks on each of four workers.
SMALL: dict[str, Any] = {"vocab": 96, "positions": 16, "hidden": 32, "layers": 6, "heads": 4}
GPT = GPTConfig(**SMALL)
# On each of two.
SHALLOW = GPTConfig(**{**SMALL, "layers": 4})
LLAMA = LlamaConfig(**SMALL, kv_heads=4, mlp_hidden=64, tied=True)
BERT = BERTConfig(**SMALL, next_sentence=True)


def trains_as_serial(verified: Verified, model: Config, grid: Grid, schedule: Schedule, **changes: Any) -> None:
    batch = Batch(len(portions(schedule)) * grid.data * grid.z, 12)
    holds(verified(Experiment(model=OurModel(model), grid=grid, batch=batch, schedule=schedule, **changes)))


def all_schedules(workers: int) -> list[Schedule]:
    """Every family at N from D/2 to 4D, among them N that D does not divide, where the family allows it."""
    d = workers
    wanted: list[tuple[str, int, dict[str, Any]]] = [
        *(
            (name, n, {})
            for name in ("gpipe", "1f1b", "gems", "zb-h1", "chimera", "chimera-zb")
            for n in (d // 2, d, 2 * d + 1)
        ),
        *((name, 2 * d, {}) for name in ("interleaved", "zb-h2", "zbv", "dualpipe", "dualpipev", "hanayo")),
        *(("chimera", n, {"mode": mode}) for mode in ("doubling", "halving") for n in (2 * d, 4 * d)),
        ("chimera", 2 * d, {"pairs": d // 2}),
        ("chimera-zb", 4 * d, {}),
    ]
    return [generate(name, workers, n, **options) for name, n, options in wanted if n > 0]


def label(schedule: Schedule) -> str:
    halves = "-halved" if schedule.halved else ""
    return f"{schedule.name}-D{len(schedule.workers)}-N{schedule.microbatches}-R{schedule.replicas}{halves}"


# Every family once on two workers, with N that two does not divide where that is allowed; those with more to go wrong among
# four, on four. The long suite has all of them on both.
ON_TWO = [
    *(generate(name, 2, 5) for name in ("gpipe", "gems", "zb-h1", "chimera")),
    *(generate(name, 2, 4) for name in ("interleaved", "zb-h2", "dualpipev", "hanayo", "auto")),
    generate("chimera", 2, 4, mode="doubling"),
    generate("chimera-zb", 2, 1),
]
ON_FOUR = [
    generate("1f1b", 4, 6),
    generate("chimera", 4, 6),
    generate("chimera", 4, 8, pairs=2),
    generate("chimera", 4, 8, mode="halving"),
    generate("chimera-zb", 4, 8),
    generate("zbv", 4, 8),
    generate("dualpipe", 4, 8),
]


@pytest.mark.parametrize("schedule", ON_TWO, ids=label)
def test_on_two_workers(verified: Verified, schedule: Schedule) -> None:
    trains_as_serial(verified, SHALLOW, Grid(pipe=2), schedule, steps=2)


def test_no_family_is_forgotten() -> None:
    asynchronous = {"pipedream", "pipedream-2bw"}  # test_asynchronous.py
    assert {schedule.name for schedule in (*ON_TWO, *ON_FOUR)} == set(FAMILIES) - asynchronous


@pytest.mark.parametrize("schedule", ON_FOUR, ids=label)
def test_on_four_workers(verified: Verified, schedule: Schedule) -> None:
    trains_as_serial(verified, GPT, Grid(pipe=4), schedule, steps=2)


# Each axis; each schedule; half of them with recomputation.
WITH_AN_AXIS = [
    ("1f1b", "x", True),
    ("chimera-zb", "y", True),
    ("1f1b", "z", False),
    ("chimera", "data", False),
    ("chimera-zb", "data", True),
]


@pytest.mark.parametrize(
    ("name", "axis", "recompute"),
    rest_is_long(product(["1f1b", "chimera", "chimera-zb"], ["x", "y", "z", "data"], [False, True]), WITH_AN_AXIS),
)
def test_with_a_cube_or_data_axis_and_recomputation(verified: Verified, name: str, axis: str, recompute: bool) -> None:
    grid = Grid.parse(f"pipe=2,{axis}=2")
    trains_as_serial(verified, SHALLOW, grid, generate(name, 2, 4), steps=2, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "grid"),
    rest_is_long(
        product([LLAMA, BERT], ["pipe=2,x=2,y=2", "pipe=2,data=2,z=2", "pipe=4,y=2"]),
        [(LLAMA, "pipe=4,y=2"), (BERT, "pipe=2,x=2,y=2")],
    ),
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_model_on_a_cube(verified: Verified, model: Config, grid: str) -> None:
    on = Grid.parse(grid)
    trains_as_serial(verified, model, on, generate("chimera-zb", on.pipe, on.pipe), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rest",
    rest_is_long(
        [
            ShardingPolicy(activations="replicated"),
            ShardingPolicy(weights="kept"),
            ShardingPolicy(weights="replicated"),
        ],
        [ShardingPolicy(weights="kept")],
    ),
)
def test_operands_at_rest(verified: Verified, rest: ShardingPolicy) -> None:
    trains_as_serial(verified, SHALLOW, Grid(pipe=2, z=2, x=2), generate("chimera", 2, 4), steps=2, rest=rest)


@pytest.mark.parametrize("grid", ["pipe=4", "pipe=2,data=2", "pipe=2,z=2"])
def test_optimizer_state_sharded_over_replicas(verified: Verified, grid: str) -> None:
    on = Grid.parse(grid)
    trains_as_serial(verified, SHALLOW, on, generate("chimera", on.pipe, on.pipe), steps=3, zero=True)


def test_float32_is_told_from_an_error_by_its_rounding(verified: Verified) -> None:
    wide = GPTConfig(**{**SMALL, "hidden": 64})
    schedule = generate("chimera-zb", 2, 4)
    report = verified(
        Experiment(
            model=OurModel(wide),
            grid=Grid(pipe=2, data=2),
            batch=Batch(8, 12),
            schedule=schedule,
            steps=2,
            zero=True,
            dtype=torch.float32,
        )
    )
    assert report.ok, (report.loss_diff, report.grad_diff, report.weight_diff)


def test_sharded_state_makes_the_second_copy_cost_weights_only(ranks: RankPool) -> None:
    """Of every parameter that divides, each of two replicas has the state of one half."""
    for held, state in ranks.run(2, _numbers_held_and_updated):
        assert state == held / 2


def _numbers_held_and_updated() -> tuple[int, int]:
    with torch.device("meta"):
        model = build(GPT)
    network = Network(Grid(pipe=2))
    fill = initial_values(model, 0, torch.float64, network.device)
    pipeline = Pipeline(model, cut_of(model), network, Batch(2, 12), fill, generate("chimera", 2, 2))
    optimizer = ShardedOptimizer(pipeline.parameters.values(), pipeline.gradients, torch.optim.AdamW)
    held = sum(local_of(parameter).numel() for parameter in pipeline.parameters.values())
    return held, sum(part.tensor.numel() for part in optimizer.parts.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("1f1b", {}),
        ("zb-h1", {"recompute": True}),
        pytest.param("chimera-zb", {}, marks=pytest.mark.long),
        pytest.param("chimera-zb", {"model": LLAMA}, marks=pytest.mark.long),
        pytest.param("zbv", {"model": BERT}, marks=pytest.mark.long),
        pytest.param("zb-h2", {"zero": True, "grid": Grid(pipe=2, data=2)}, marks=pytest.mark.long),
    ],
)
def test_compiled_stages(ranks: RankPool, verified: Verified, name: str, changes: dict[str, Any]) -> None:
    """Also where weight gradients are put off."""
    chosen: dict[str, Any] = {"model": SHALLOW, "grid": Grid(pipe=2), **changes}
    ranks.run(chosen["grid"].world, without_kernels)
    trains_as_serial(verified, schedule=generate(name, 2, 4), compile=True, **chosen)


def test_stages_that_recompute_are_chosen_one_by_one(ranks: RankPool) -> None:
    assert ranks.run(2, _recomputed_blocks) == [[f"blocks.{number}" for number in range(3)], []]


def _recomputed_blocks() -> list[str]:
    with torch.device("meta"):
        model = build(GPT)
    network = Network(Grid(pipe=2))
    fill = initial_values(model, 0, torch.float64, network.device)
    schedule = generate("1f1b", 2, 2)
    pipeline = Pipeline(model, cut_of(model), network, Batch(2, 12), fill, schedule, recompute={0})
    modules = ((name, module) for _, model in pipeline.models for name, module in model.named_modules())
    return [name for name, module in modules if getattr(vars(module).get("forward"), "func", None) is weave.recompute]


@pytest.mark.parametrize(
    ("sync", "tied"),
    rest_is_long(product(["eager", "eager-opt"], [True, False]), [("eager", False), ("eager-opt", True)]),
)
def test_gradients_summed_eagerly(verified: Verified, sync: str, tied: bool) -> None:
    model = GPTConfig(**SMALL, tied=tied)
    schedule = synchronised(generate("chimera", 4, 4), Sync(sync))
    trains_as_serial(verified, model, Grid(pipe=4), schedule, steps=2)


@pytest.mark.slow
def test_dropout_does_not_depend_on_the_schedule(verified: Verified) -> None:
    model = replace(SHALLOW, dropout=0.2)
    for name, recompute in (("1f1b", True), ("chimera-zb", False)):
        schedule = generate(name, 2, 4)
        trains_as_serial(verified, model, Grid(pipe=2, data=2), schedule, steps=2, recompute=recompute)


def _losses_with_seeds(*seeds: int) -> list[float]:
    network = Network(Grid())
    found = []
    for seed in seeds:
        with torch.device("meta"):
            model = build(replace(SHALLOW, dropout=0.5))
        fill = initial_values(model, 0, torch.float64)
        pipeline = Pipeline(model, cut_of(model), network, Batch(2, 12), fill, generate("gpipe", 1, 1), seed=seed)
        tokens = torch.arange(24).view(2, 12)
        found.append(pipeline.step({"tokens": tokens, "targets": tokens}))
    return found


def test_another_seed_drops_others(ranks: RankPool) -> None:
    ((first, same, other),) = ranks.run(1, _losses_with_seeds, 0, 0, 1)
    assert first == same != other


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("axis", ["", ",x=2", ",data=2"])
@pytest.mark.parametrize("schedule", [*all_schedules(2), *all_schedules(4)], ids=label)
def test_every_schedule(verified: Verified, schedule: Schedule, axis: str, recompute: bool) -> None:
    grid = Grid.parse(f"pipe={len(schedule.workers)}{axis}")
    trains_as_serial(verified, GPT, grid, schedule, steps=3, recompute=recompute)
