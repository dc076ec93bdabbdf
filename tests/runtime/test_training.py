"""Every synchronous schedule trains as the serial model does, bytes as predicted, replicas equal to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from cubeloom import Grid
from cubeloom.cube import Batch, Rest
from cubeloom.launch import RankPool
from cubeloom.models import BERTConfig, Config, GPTConfig, LlamaConfig
from cubeloom.pipeline import Schedule, Sync, generate, synchronised
from cubeloom.runtime.microbatches import portions
from cubeloom.verify import Experiment, verify

pytestmark = pytest.mark.timeout(180)

SMALL: dict[str, Any] = {"vocab": 96, "positions": 16, "hidden": 32, "layers": 8, "heads": 4}
GPT = GPTConfig(**SMALL)
LLAMA = LlamaConfig(**SMALL, kv_heads=4, mlp_hidden=64, tied=True)
BERT = BERTConfig(**SMALL, next_sentence=True)


def trains_as_serial(ranks: RankPool, model: Config, grid: Grid, schedule: Schedule, **changes: Any) -> None:
    batch = Batch(len(portions(schedule)) * grid.data * grid.z, 12)
    report = verify(Experiment(model=model, grid=grid, batch=batch, schedule=schedule, **changes), pool=ranks)
    assert report.loss_diff <= 1e-10
    assert report.grad_diff <= 1e-10
    assert report.weight_diff <= 1e-10
    assert report.bytes_agree, (report.counted, report.predicted)
    assert report.replicas_agree


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


@pytest.mark.parametrize("schedule", all_schedules(2)[::2], ids=label)
def test_on_two_workers(ranks: RankPool, schedule: Schedule) -> None:
    trains_as_serial(ranks, GPT, Grid(pipe=2), schedule, steps=2)


SHORT = [
    generate("1f1b", 4, 6),
    generate("chimera", 4, 4),
    generate("chimera", 4, 6),
    generate("chimera", 4, 8, pairs=2),
    generate("chimera", 4, 8, mode="halving"),
    generate("chimera-zb", 4, 8),
    generate("zbv", 4, 8),
    generate("dualpipe", 4, 8),
]


@pytest.mark.parametrize("schedule", SHORT, ids=label)
def test_on_four_workers(ranks: RankPool, schedule: Schedule) -> None:
    trains_as_serial(ranks, GPT, Grid(pipe=4), schedule, steps=2)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("axis", ["x", "y", "z", "data"])
@pytest.mark.parametrize("name", ["1f1b", "chimera", "chimera-zb"])
def test_with_a_cube_or_data_axis_and_recomputation(ranks: RankPool, name: str, axis: str, recompute: bool) -> None:
    grid = Grid.parse(f"pipe=2,{axis}=2")
    trains_as_serial(ranks, GPT, grid, generate(name, 2, 4), steps=2, recompute=recompute)


@pytest.mark.parametrize("model", [LLAMA, BERT], ids=["llama", "bert"])
@pytest.mark.parametrize("grid", ["pipe=2,x=2,y=2", "pipe=2,data=2,z=2", "pipe=4,y=2"])
def test_every_model_on_a_cube(ranks: RankPool, model: Config, grid: str) -> None:
    on = Grid.parse(grid)
    trains_as_serial(ranks, model, on, generate("chimera-zb", on.pipe, on.pipe), steps=2)


@pytest.mark.parametrize("rest", [Rest(activations="replicated"), Rest(weights="kept"), Rest(weights="replicated")])
def test_operands_at_rest(ranks: RankPool, rest: Rest) -> None:
    trains_as_serial(ranks, GPT, Grid(pipe=2, z=2, x=2), generate("chimera", 2, 4), steps=2, rest=rest)


@pytest.mark.parametrize("sync", ["eager", "eager-opt"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_summed_eagerly(ranks: RankPool, sync: str, tied: bool) -> None:
    model = GPTConfig(**SMALL, tied=tied)
    schedule = synchronised(generate("chimera", 4, 4), Sync(sync))
    trains_as_serial(ranks, model, Grid(pipe=4), schedule, steps=2)


def test_dropout_does_not_depend_on_the_schedule(ranks: RankPool) -> None:
    model = GPTConfig(**SMALL, dropout=0.2)
    for name, recompute in (("1f1b", True), ("chimera-zb", False)):
        schedule = generate(name, 2, 4)
        trains_as_serial(ranks, model, Grid(pipe=2, data=2), schedule, steps=2, recompute=recompute)


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("axis", ["", ",x=2", ",data=2"])
@pytest.mark.parametrize("schedule", [*all_schedules(2), *all_schedules(4)], ids=label)
def test_every_schedule(ranks: RankPool, schedule: Schedule, axis: str, recompute: bool) -> None:
    grid = Grid.parse(f"pipe={len(schedule.workers)}{axis}")
    trains_as_serial(ranks, GPT, grid, schedule, steps=3, recompute=recompute)
