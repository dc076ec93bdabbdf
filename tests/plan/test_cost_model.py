"""The closed forms of a plan: bytes to the byte of what the ledger counts, the papers' models, schedules, memory, legality."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from cubeloom.base.divisors import divisors
from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid, grids
from cubeloom.models import build, cut_of
from cubeloom.models import names as presets
from cubeloom.parallel import Batch, Cut, ShardingPolicy, step_volume
from cubeloom.parallel.config import WEIGHTS, ParallelConfig
from cubeloom.parallel.resolution import problems, specs_of
from cubeloom.parallel.specs import LinearSpec, collectives
from cubeloom.parallel.volume import named
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime.build import plan_stages
from cubeloom.plan.cost_model import papers
from cubeloom.plan.cost_model.volume import pipeline_bytes, step_bytes
from cubeloom.plan.model import load, names, refusals
from cubeloom.plan.model.derive import derive
from cubeloom.plan.model.flops import flops, parameters
from grids import rest_is_long

MODELS = ("gpt-tiny", "llama-tiny", "bert-tiny", "unet-tiny")
RESTS = [
    ShardingPolicy(activations=activations, weights=weights, inputs=inputs)  # type: ignore[arg-type]
    for activations, weights, inputs in product(("sharded", "replicated"), WEIGHTS, ("kept", "regathered"))
]


def skeleton(name: str) -> tuple[torch.nn.Module, Cut]:
    with torch.device("meta"):
        model = build(name)
    return model, cut_of(model)


def settings(grid: Grid, rest: ShardingPolicy, samples: int, sequence: int, rank: int = 0) -> ParallelConfig:
    """Exact: every size a fraction."""
    return ParallelConfig.exact(grid, rest, Batch(samples, sequence), 8, grid.coordinates(rank))


def every_grid(most: int) -> list[Grid]:
    return [grid for world in range(1, most + 1) for grid in grids(world, ("data", "z", "y", "x"))]


def compare_steps(name: str, cases: list[tuple[Grid, ShardingPolicy]], samples: int, sequence: int) -> int:
    """How many of these can be cut; of those the bytes must be equal."""
    model, cut = skeleton(name)
    layers, batch, compared = load(name), Batch(samples, sequence), 0
    found = specs_of(model, cut)
    for grid, rest in cases:
        if any(problems(found, grid, rest, batch)):
            continue
        s = settings(grid, rest, samples, sequence)
        assert named(step_bytes(layers, s).items(), s) == step_volume(found, s, zero=True), (name, grid, rest)
        compared += 1
    return compared


@pytest.mark.parametrize(("name", "cases"), [(name, 20 if name == "unet-tiny" else 60) for name in MODELS])
def test_bytes_are_those_of_the_ledger(name: str, cases: int) -> None:
    chosen = random.Random(name).sample(list(product(every_grid(8), RESTS)), cases)
    assert compare_steps(name, chosen, samples=96, sequence=24) > cases / 3


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_bytes_on_every_grid(name: str) -> None:
    assert compare_steps(name, list(product(every_grid(8), RESTS)), samples=96, sequence=24) > 400


@pytest.mark.parametrize("world", [64, 512])
def test_bytes_on_large_grids(world: int) -> None:
    chosen = random.Random(world)
    cases = [(grid, chosen.choice(RESTS)) for grid in chosen.sample(list(grids(world, ("data", "z", "y", "x"))), 12)]
    assert compare_steps("gpt-tiny", cases, samples=1536, sequence=48) > 0
    assert compare_steps("gpt-5b", cases[:2], samples=4096, sequence=256) > 0


PLANES = (Grid(pipe=2, data=2), Grid(pipe=2, z=2), Grid(pipe=2, y=2, x=2), Grid(pipe=2, z=2, y=2))


def pipelines(chosen: random.Random) -> Iterator[tuple[str, dict[str, Any], Grid]]:
    schedules: list[tuple[str, dict[str, Any]]] = [
        ("gpipe", {}),
        ("1f1b", {}),
        ("interleaved", {}),
        ("zb-h1", {}),
        ("zbv", {}),
        ("dualpipe", {}),
        ("chimera", {}),
        ("chimera", {"mode": "halving"}),
        ("chimera", {"mode": "doubling"}),
        ("chimera-zb", {}),
    ]
    for name, options in schedules:
        yield name, options, chosen.choice(PLANES)


@pytest.mark.parametrize("name", rest_is_long(MODELS, MODELS[:3]))
def test_bytes_of_pipelines_are_those_of_the_ledger(name: str) -> None:
    model, cut = skeleton(name)
    chosen = random.Random(name)
    for schedule_name, options, grid in pipelines(chosen):
        schedule = generate(schedule_name, 2, 4, **options)
        rest = chosen.choice(RESTS)
        batch = Batch(4 * 4 * 2 * grid.data * grid.z, 24)
        try:
            layout = plan_stages(model, cut, grid, batch, schedule, rest)
        except UserError:
            continue  # fewer pieces than stages
        portions = 8 if schedule.halved else 4
        layers = load(name)
        for rank in range(grid.world):
            here = grid.coordinates(rank)
            s = settings(grid, rest, batch.samples // portions, 24, rank)
            ours = named(pipeline_bytes(layers, s, schedule, here["pipe"]).items(), s)
            whole = replace(s, samples=s.samples * portions)
            theirs = layout.volume(whole, here["pipe"], zero=True)
            assert ours == theirs, (schedule_name, options, grid, rest, rank)


def test_arrays_give_what_single_settings_give() -> None:
    """One call for many decompositions, as a search makes it."""
    model = load("llama-tiny")
    every = [grid for grid in every_grid(6) if 24 % (grid.x * grid.y) == 0]
    data, z, y, x = (np.array([float(grid.size(axis)) for grid in every]) for axis in ("data", "z", "y", "x"))
    many = ParallelConfig(data=data, z=z, y=y, x=x, samples=60.0, sequence=24)
    found = step_bytes(model, many)
    for place, grid in enumerate(every):
        s = settings(grid, ShardingPolicy(), 60, 24)
        one = step_bytes(model, ParallelConfig(**{**vars(s), "item": 2}))
        for axes, size in one.items():
            assert float(size) == pytest.approx(np.broadcast_to(found[axes], len(every))[place], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "cases"),
    [  # to see the pixels of a network on images takes a tenth of a second
        *((name, 30 if name == "unet-tiny" else 150) for name in MODELS),
        pytest.param("unet-tiny", 300, marks=pytest.mark.long),
    ],
)
def test_refuses_what_the_cut_refuses(name: str, cases: int) -> None:
    model, cut = skeleton(name)
    layers, specs = load(name), specs_of(model, cut)
    every = list(product(every_grid(9), RESTS[::2], [(1, 7), (12, 24), (40, 3)]))
    for grid, rest, (samples, sequence) in random.Random(name).sample(every, cases):
        complaints = list(problems(specs, grid, rest, Batch(samples, sequence)))
        s = settings(grid, rest, samples, sequence)
        plain = ParallelConfig(
            **{**vars(s), **{axis: float(grid.size(axis)) for axis in ("data", "z", "y", "x")}, "samples": samples}
        )
        found = [reason for reason, where in refusals(layers, plain) if np.any(where)]
        assert bool(found) == bool(complaints), (grid, rest, samples, sequence, complaints, found)


def test_heads_are_refused_where_features_divide() -> None:
    """GPT-2 has 12 heads of 64 features: 8 devices divide the features of its blocks and not the heads."""
    s = ParallelConfig(data=1.0, z=1.0, y=8.0, x=1.0, samples=8, sequence=64)
    model = load("gpt2")
    block = replace(model, kinds=model.kinds[1:2])
    assert {reason for reason, where in refusals(block, s) if np.any(where)} == {"heads over x and y"}


def test_the_lists_are_those_of_the_real_modules() -> None:
    assert set(names()) == set(presets())
    for name in (*MODELS, "resnet-tiny", "gpt2", "bert-base"):
        assert derive(name) == load(name), f"{name} has changed: python -m cubeloom.plan.model"


@pytest.mark.long
def test_all_lists_are_those_of_the_real_modules() -> None:
    for name in presets():
        assert derive(name) == load(name), f"{name} has changed: python -m cubeloom.plan.model"


def test_operations_are_those_of_the_literature() -> None:
    """6 a parameter and token, and attention: Narayanan et al.'s 72 B s l h² (1 + s/6h + V/12lh), without recomputation."""
    model = load("gpt-80b")
    layers, hidden, vocabulary, sequence = 42, 12288, 51200, 2048
    published = 72 * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden))
    assert flops(model, sequence) == pytest.approx(published, rel=1e-9)
    assert 76e9 < parameters(model) < 84e9


def test_tensor3d_block_is_its_equation() -> None:
    """A Transformer's linears on a plane, activations replicated: equation and closed form agree exactly."""
    model = load("gpt-80b")
    linears = [layer for layer in model.kinds[1].layers if isinstance(layer, LinearSpec)]
    for x, y, data in [(1, 8, 1), (2, 4, 2), (4, 16, 8), (8, 8, 1)]:
        rows = Fraction(64 * 2048)
        s = ParallelConfig(
            data=Fraction(data), z=Fraction(1), y=Fraction(y), x=Fraction(x), samples=Fraction(64), sequence=2048,
            sharded=False, item=1,
        )  # fmt: skip
        ours = sum(each.received for layer in linears for each in collectives(layer, s))
        assert ours == papers.tensor3d_block(12288, rows, Fraction(x), Fraction(y), Fraction(data))
        singles = [
            papers.tensor3d_layer(layer.k, layer.n, rows, s.size(layer.k_axis), s.size(layer.n_axis), data)
            for layer in linears
        ]
        assert ours == sum(singles)


@pytest.mark.parametrize(("ranks", "plane"), [(8, (2, 4)), (64, (4, 16)), (256, (8, 32))])
def test_best_plane_of_a_gpt_is_tensor3ds(ranks: int, plane: tuple[int, int]) -> None:
    """The rule's optimum, and the best of all planes by the closed form: as `bench/tensor3d.py` prints."""
    model = load("gpt-80b")
    planes = [(x, ranks // x) for x in divisors(ranks)]
    s = ParallelConfig(
        data=1.0, z=1.0, x=np.array([float(x) for x, _ in planes]), y=np.array([float(y) for _, y in planes]),
        samples=256.0, sequence=2048, sharded=False,
    )  # fmt: skip
    total = sum(
        each.received
        for layer in model.kinds[1].layers
        if isinstance(layer, LinearSpec)
        for each in collectives(layer, s)
    )
    assert planes[int(np.argmin(total))] == plane
    gi, go = papers.tensor3d_best(ranks)
    assert plane[0] / 2 < gi < plane[0] * 2 and plane[1] / 2 < go < plane[1] * 2


def test_a_linear_on_the_cube_is_bians() -> None:
    layer = LinearSpec(name="linear", k=64, n=96, side="x", bias=False)
    s = ParallelConfig(data=1.0, z=2.0, y=4.0, x=2.0, samples=16.0, sequence=8, item=1)
    x, w, y = papers.cube_layer(128, 64, 96, 2, 2, 4)
    forward = sum(each.received for each in collectives(layer, s) if each.phase == "F")
    assert forward == pytest.approx(x + w + y)
