"""How fast a plan is found: decompositions a second in closed form, seconds of the search, seconds of a simulated step.

    python bench/plan.py [--quick]

One core, no device. In a search, decompositions that have something in common have it computed once, and those that the bound
rules out have their messages and sums of gradients left out; every one has its memory and its bound. `each on its own` is the
rate without any of that. Calculon, the fastest published, evaluates 54 a second and core (`reference/planning.md`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cubeloom.base.grid import Grid
from cubeloom.parallel.config import ParallelConfig
from cubeloom.plan.cost_model.peak import memory
from cubeloom.plan.cost_model.schedules import SHAPES
from cubeloom.plan.cost_model.step import step
from cubeloom.plan.cost_model.worker_load import carry, loads
from cubeloom.plan.hardware import cluster
from cubeloom.plan.model import load
from cubeloom.plan.search import search
from cubeloom.plan.search.find import cost, find
from cubeloom.plan.search.refine import plan_times
from cubeloom.plan.search.space import Task
from cubeloom.plan.simulate import StageTimes, schedule_of, simulate_ranks


@dataclass(frozen=True)
class Row:
    what: str
    figure: float
    unit: str


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    found = work()
    return found, time.process_time() - began


def closed_form(model: str, devices: int, samples: int) -> Row:
    layers, machine = load(model), cluster("perlmutter")
    task = Task(samples, layers.sequence, devices)
    (_, tally), seconds = timed(lambda: find(layers, machine, task, "bf16", 200))
    what = f"closed form, {model} on {devices} devices: {tally.considered:,} decompositions"
    return Row(what, tally.considered / seconds, "a second")


def each_on_its_own(model: str, count: int) -> Row:
    """Time and memory of so many decompositions, one array element each, nothing shared."""
    layers, machine, draw = load(model), cluster("perlmutter"), np.random.default_rng(0)
    data, z, y, x = (2.0 ** draw.integers(0, 5, count) for _ in range(4))
    rank_stride = {"x": np.ones(count), "y": x, "z": x * y, "data": x * y * z, "pipe": x * y * z * data}
    s = ParallelConfig(
        data=data, z=z, y=y, x=x, samples=data * z * 2.0 ** draw.integers(1, 4, count), sequence=layers.sequence,
        sharded=draw.random(count) < 0.5, weights=draw.integers(0, 3, count), regathered=draw.random(count) < 0.5,
        ways=1.0 + draw.integers(0, 2, count), rank_stride=rank_stride,
    )  # fmt: skip
    shape = next(shape for shape in SHAPES if shape.name == "1f1b")
    held = loads(layers, shape, 4)

    def work() -> None:
        carried = carry(held, cost(layers, s, machine, "bf16"))
        for each, one in zip(held, carried, strict=True):
            memory(shape, 4, each.first, 16.0, one, 2, recompute=False)
        step(shape, 4, 16.0, carried, s, machine, recompute=False)

    return Row(f"closed form, {model}, each on its own", count / timed(work)[1], "a second")


def whole_search(model: str, devices: int, samples: int) -> Row:
    answer, seconds = timed(lambda: search(model, "perlmutter", devices, samples))
    simulated = sum(plan.simulated for plan in answer.plans)
    return Row(f"search, {model} on {devices} devices, {simulated} plans simulated", seconds, "s")


def step_of(ranks: int) -> Row:
    """Every rank computes at a speed of its own; 1F1B on 16 workers, 64 micro-batches."""
    machine, layers = cluster("perlmutter"), load("gpt-80b")
    grid = Grid(pipe=16, data=ranks // 64, y=4)
    task = Task(64 * grid.data, layers.sequence, ranks)
    shape = next(shape for shape in SHAPES if shape.name == "1f1b")
    answer = search(layers, machine, ranks, task.samples, only=grid, keep=1)
    times = plan_times(layers, machine, task, "bf16", answer.plans[0])
    slowness = 1 + 0.05 * np.random.default_rng(0).random((grid.pipe, grid.data, grid.cube))
    one = StageTimes(
        times.forward[:16, 0], times.backward[:16, 0], times.input_grad[:16, 0], times.weight_grad[:16, 0],
        float(np.max(times.message)), times.reduction[:16, 0],
    )  # fmt: skip
    _, seconds = timed(lambda: simulate_ranks(schedule_of(shape, 16, 64), one, grid, slowness))
    return Row(f"simulated step of {ranks:,} ranks, 16 × {grid.data} × 4", seconds, "s")


def rows(quick: bool) -> list[Row]:
    devices, ranks = (64, 1024) if quick else (1024, 4096)
    return [
        closed_form("gpt-80b", devices, 1024),
        each_on_its_own("gpt-80b", 10_000),
        whole_search("gpt-80b", devices, 1024),
        step_of(ranks),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 devices and 1,024 ranks")
    table = Table(title="planning, seconds of one core")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_column("unit")
    for row in rows(parser.parse_args().quick):
        table.add_row(row.what, f"{row.figure:,.0f}" if row.figure > 100 else f"{row.figure:.2f}", row.unit)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
