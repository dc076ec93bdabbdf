"""The planner's step times beside those of ranks whose computation and network are emulated.

    python -m bench.emulated [--quick] [--json]

For each decomposition the planner says how long a step takes on a cluster of eight slow devices. Then as many processes run
that step: the true program of each rank, with waits for what its device computes and for what its network carries
(`bench/emulated_program.py`, `cubeloom.tools.emulate`). Exit 1 if a prediction is more than 5 % off, or if the decomposition
that the planner finds fastest is more than 3 % slower than the one that was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.emulated_program import programs
from cubeloom.base.grid import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, OurModel
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.parallel.config import WEIGHTS, Activations, Inputs, Weights
from cubeloom.pipeline import Schedule
from cubeloom.pipeline.sync import Sync, synchronised
from cubeloom.plan.cost_model.schedules import ScheduleModel, shapes
from cubeloom.plan.hardware import Cluster, Device
from cubeloom.plan.hardware.facts import Fact
from cubeloom.plan.model import Model
from cubeloom.plan.model.derive import derive
from cubeloom.plan.search.best import Candidate
from cubeloom.plan.search.found import Plan
from cubeloom.plan.search.refine import placed, refined
from cubeloom.plan.search.space import Task
from cubeloom.plan.simulate import schedule_of
from cubeloom.tools.emulate import EmulatedRank, EmulatedStep, Program
from cubeloom.tools.verify import Experiment

MODEL = GPTConfig(vocab=4096, positions=256, hidden=1024, layers=8, heads=16, tied=False)
SAMPLES, SEQUENCE = 16, 256
WORST, REGRET = 0.05, 0.03
PUNCTUAL = (
    0.01  # of a step: if processes were later than that, the machine was too busy to show it, and it is done again
)


def _emulated(kind: type[Any], values: dict[str, float], **rest: Any) -> Any:
    """A device or cluster of these numbers, that are what they are because we say so."""
    facts = {name: Fact(value, "of the emulation", "measured") for name, value in values.items()}
    return kind(name="emulated", about="ranks that wait", facts=facts, **values, **rest)


# Slow enough that a step lasts about a second, and what processes cost is small beside it.
DEVICE: Device = _emulated(
    Device,
    {
        "bf16": 0.3e12, "fp16": 0.3e12, "fp32": 0.3e12, "matmul_fraction": 1.0, "processors": 1, "tile_rows": 1,
        "tile_columns": 1, "memory": 1e12, "bandwidth": 2e11, "bandwidth_fraction": 1.0, "launch": 0.0, "host": 0.0,
    },
)  # fmt: skip
CLUSTER: Cluster = _emulated(
    Cluster,
    {
        "nodes": 1, "devices_per_node": 8, "link_bandwidth": 4e9, "pair_bandwidth": 4e9, "link_latency": 5e-5,
        "link_drag": 0.0, "nics": 1, "nic_bandwidth": 4e9, "nic_latency": 5e-5, "nic_drag": 0.0, "start": 1e-4,
        "eager_fraction": 0.0,
    },
    device=DEVICE,
)  # fmt: skip


@dataclass(frozen=True)
class Decomposition:
    pipe: int = 1
    data: int = 1
    z: int = 1
    y: int = 1
    x: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    activations: Activations = "sharded"
    weights: Weights = "freed"
    inputs: Inputs = "kept"
    ways: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        plain = Decomposition()
        changed = {each.name: getattr(self, each.name) for each in fields(self)}
        return " ".join(f"{name}={value}" for name, value in changed.items() if value != getattr(plain, name))

    @property
    def ranks(self) -> int:
        return self.pipe * self.data * self.z * self.y * self.x

    @property
    def shape(self) -> ScheduleModel:
        return next(shape for shape in shapes(self.pipe) if shape.title == self.schedule)

    @property
    def candidate(self) -> Candidate:
        return Candidate(
            seconds=0.0,
            shape=self.shape,
            workers=self.pipe,
            data=self.data,
            microbatches=self.microbatches,
            recompute=self.recompute,
            cube=(self.z, self.y, self.x),
            microbatch=SAMPLES // (self.microbatches * self.data * self.z),
            sharded=self.activations == "sharded",
            weights=WEIGHTS.index(self.weights),
            regathered=self.inputs == "regathered",
            ways=self.ways,
        )


D = Decomposition
DECOMPOSITIONS = (
    D(data=8, microbatches=2),
    D(z=8, microbatches=2),
    D(z=8, microbatches=2, weights="kept"),
    D(z=8, microbatches=2, weights="replicated"),
    D(x=8),
    D(y=4, x=2, microbatches=2),
    D(y=2, x=4, microbatches=2),
    D(y=2, x=4, microbatches=2, activations="replicated"),
    D(y=4, x=2, microbatches=2, inputs="regathered"),
    D(y=4, x=2, ways=2),
    D(y=2, x=4, microbatches=2, activations="replicated", ways=2),
    D(z=2, y=2, x=2, microbatches=2),
    D(z=2, y=2, x=2, microbatches=2, activations="replicated"),
    D(z=2, y=2, x=2, ways=2),
    D(z=4, y=2, microbatches=2, weights="kept"),
    D(data=2, z=2, x=2, microbatches=2),
    D(data=2, y=2, x=2, microbatches=2),
    D(data=4, x=2, microbatches=2, ways=2),
    D(data=2, z=4, microbatches=2),
    D(data=2, x=4, microbatches=2, activations="replicated", ways=2),
    D(pipe=2, data=4, microbatches=4),
    D(pipe=2, z=4, microbatches=4, schedule="zb-h1"),
    D(pipe=2, y=2, x=2, microbatches=4, schedule="gpipe"),
    D(pipe=2, data=2, x=2, microbatches=4, schedule="interleaved"),
    D(pipe=2, z=2, x=2, microbatches=4, recompute=True),
    D(pipe=2, y=2, x=2, microbatches=4, ways=2),
    D(pipe=2, data=2, y=2, microbatches=8, schedule="chimera direct"),
    D(pipe=4, data=2, microbatches=8),
    D(pipe=4, data=2, microbatches=4, schedule="gpipe"),
    D(pipe=4, data=2, microbatches=8, schedule="zb-h1"),
    D(pipe=4, data=2, microbatches=8, schedule="chimera direct"),
    D(pipe=4, data=2, microbatches=8, schedule="chimera doubling"),
    D(pipe=4, data=2, microbatches=8, schedule="chimera-zb"),
    D(pipe=4, z=2, microbatches=8, schedule="chimera direct"),
    D(pipe=4, x=2, microbatches=8, schedule="chimera-zb"),
    D(pipe=4, x=2, microbatches=8, schedule="dualpipe"),
    D(pipe=8, microbatches=8, schedule="chimera direct"),
)


def predicted(d: Decomposition) -> Plan:
    """What the planner says: the closed form, then the simulator."""
    task = Task(SAMPLES, SEQUENCE, d.ranks, item=4)
    plans = placed(_layers(), CLUSTER, task, "fp32", [d.candidate])
    return refined(_layers(), CLUSTER, task, "fp32", plans, 1)[0]


@cache
def _layers() -> Model:
    return derive("emulated", OurModel(MODEL))


def experiment(d: Decomposition, grid: Grid) -> Experiment:
    """The job that the decomposition is. Stages of a pipeline sum their gradients as soon as they have them."""
    schedule = schedule_of(d.shape, d.pipe, d.microbatches)
    return Experiment(
        model=OurModel(MODEL),
        grid=grid,
        batch=Batch(SAMPLES, SEQUENCE),
        rest=ShardingPolicy(activations=d.activations, weights=d.weights, inputs=d.inputs),
        dtype=torch.float32,
        schedule=synchronised(schedule, Sync.EAGER) if d.pipe > 1 else schedule,
        ways=d.ways,
        recompute=d.recompute,
        zero=True,
    )


def measure(grid: Grid, schedule: Schedule, each: list[Program], repeats: int) -> list[EmulatedStep]:
    """On each rank: steps until so many were punctual, or three times as many were done."""
    rank = EmulatedRank(Network(grid), schedule, each)
    steps: list[EmulatedStep] = []
    while sum(map(punctual, steps)) < repeats and len(steps) < 3 * repeats:
        steps.append(rank.step())
    return steps


def punctual(step: EmulatedStep) -> bool:
    return step.late < PUNCTUAL * step.seconds


@dataclass(frozen=True)
class Row:
    decomposition: Decomposition
    predicted: float
    steps: tuple[EmulatedStep, ...]

    @property
    def measured(self) -> float:
        """The median of the punctual steps; of all, if there was none."""
        return median([step.seconds for step in self.steps if punctual(step)] or [step.seconds for step in self.steps])

    @property
    def difference(self) -> float:
        return self.measured / self.predicted - 1

    @property
    def late(self) -> int:
        return sum(not punctual(step) for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        return {
            "decomposition": str(self.decomposition),
            "predicted_s": self.predicted,
            "measured_s": self.measured,
            "difference": self.difference,
            "late_steps": self.late,
        }


def compare(pool: RankPool, d: Decomposition, repeats: int) -> Row:
    plan = predicted(d)
    job = experiment(d, plan.grid)
    assert job.schedule is not None
    each = programs(job, CLUSTER, "fp32")
    steps = pool.run(d.ranks, measure, plan.grid, job.schedule, each, repeats)[0]  # all ranks say the same
    return Row(d, plan.seconds, tuple(steps))


def regret(rows: Sequence[Row]) -> float:
    """How much slower than the fastest the one is that was predicted to be."""
    chosen = min(rows, key=lambda row: row.predicted)
    return chosen.measured / min(row.measured for row in rows) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every sixth decomposition, one step of each")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120, stderr=options.json)
    chosen, repeats = (DECOMPOSITIONS[::6], 1) if options.quick else (DECOMPOSITIONS, 3)
    with RankPool(max(d.ranks for d in chosen)) as pool:
        rows = [compare(pool, d, repeats) for d in chosen]
    console.print(table(rows))
    worst, lost = max(rows, key=lambda row: abs(row.difference)), regret(rows)
    console.print(f"largest difference: {worst.difference:+.1%} ({worst.decomposition}); regret {lost:.1%}")
    if options.json:
        whole = {"rows": [row.as_json() for row in rows], "worst": abs(worst.difference), "regret": lost}
        print(json.dumps(whole))
    return 1 if abs(worst.difference) > WORST or lost > REGRET else 0


def table(rows: Sequence[Row]) -> Table:
    found = Table(title="a step of emulated ranks: predicted by the planner, and measured")
    for heading in ("decomposition", "predicted ms", "measured ms", "difference", "late steps"):
        found.add_column(heading, justify="left" if heading == "decomposition" else "right")
    for row in rows:
        figures = f"{1000 * row.predicted:.0f}", f"{1000 * row.measured:.0f}", f"{row.difference:+.1%}", str(row.late)
        found.add_row(str(row.decomposition), *figures)
    return found


if __name__ == "__main__":
    sys.exit(main())
