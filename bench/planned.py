"""Does the planner know what is fastest here? Calibrate, plan, train the best plan of every grid and schedule, compare.

    OMP_NUM_THREADS=1 python -m bench.planned               # four ranks that share a GPU, GPT 350M, 8 × 1024 tokens
    OMP_NUM_THREADS=1 python -m bench.planned --cpu --quick # two ranks, tiny, to see that it runs

Every plan is trained as `cubeloom train` would train its settings file; beside them torch's own recipes, whole steps with
AdamW. Ends with 1 where the fastest that was measured is not among the planner's first three.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from bench.gpu import TINY
from bench.ours import number_type, our_config, our_sizes, tokens_of
from bench.peers import gpt as peer
from bench.peers import schedules, sharded
from bench.peers.gpt import Size
from bench.peers.timing import Step, Timed, slowest, take_turns
from cubeloom import Grid, UserError
from cubeloom.base.grid import AXES, grids
from cubeloom.cli.calibrate import Calibrate
from cubeloom.comm import Network, devices
from cubeloom.launch import RankPool
from cubeloom.launch.share_gpu import sharing
from cubeloom.models import OurModel
from cubeloom.plan.hardware import cluster
from cubeloom.plan.model.derive import derive
from cubeloom.plan.search import Answer, Plan, search
from cubeloom.tools.measure import step_times
from cubeloom.tools.rehearse.plans import job_of as planned_job
from cubeloom.train.job import Job, check
from cubeloom.train.job.settings import ModelSettings, OptimizerSettings

SIZE = Size(layers=24, hidden=1024, heads=16, sequence=1024, samples=8)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Measure what the planner's ranking is worth on this machine."""

    ranks: int = 4
    most: int = 24
    """Plans to train, the best of as many grids and schedules."""
    steps: int = 5
    cluster: Path | None = None
    """A file that `cubeloom calibrate` wrote; without it, this machine is measured first."""
    cpu: bool = False
    quick: bool = False

    def __call__(self, console: Console) -> int:
        kind: devices.Kind = devices.CPU if self.cpu else "cuda"
        size, ranks = (TINY, 2) if self.quick else (SIZE, self.ranks)
        with tempfile.TemporaryDirectory(prefix="cubeloom-planned-") as folder:
            machine = self.cluster or Path(folder) / "machine.toml"
            if self.cluster is None:
                share = 1 if self.cpu else ranks // devices.count(kind)
                Calibrate(output=machine, device=kind, share_gpu=share, quick=self.quick, json=True)()
            chosen = ranked(size, machine, ranks, kind)[: 4 if self.quick else self.most]
            with sharing(ranks, kind), RankPool(ranks, kind) as pool:
                peers = slowest(pool.run(ranks, peers_timed, size, kind, ranks, self.steps, timeout=600))
                for each in peers:
                    print(json.dumps({"peer": each.name, "measured_ms": round(each.step_ms, 2)}), flush=True)
                rows = []
                for answer, plan in chosen:
                    ms = step_ms(pool, job_of(Path(folder), answer, plan, size, kind), self.steps)
                    rows.append((plan, ms))
                    # A run that is cut off has said what it saw.
                    print(json.dumps(as_json(plan, ms)), flush=True)
        return told(console, rows, peers)


def ranked(size: Size, machine: Path, ranks: int, kind: devices.Kind) -> list[tuple[Answer, Plan]]:
    """The best plan of every grid and schedule, as the planner ranks them."""
    dtype = number_type(kind)
    model = derive("gpt", OurModel(our_config(size)))
    found: list[tuple[Answer, Plan]] = []
    for grid in grids(ranks, AXES):
        try:
            answer = search(
                model,
                cluster(machine),
                ranks,
                size.samples,
                size.sequence,
                "bf16" if dtype.itemsize == 2 else "fp32",
                grid,
                record=kind != devices.CPU,
            )
        except UserError:
            continue  # nothing fits on it
        best: dict[str, Plan] = {}
        for plan in answer.plans:
            best.setdefault(plan.shape.title, plan)
        found += [(answer, plan) for plan in best.values()]
    return sorted(found, key=lambda pair: pair[1].seconds)


def job_of(folder: Path, answer: Answer, plan: Plan, size: Size, kind: devices.Kind) -> Job:
    """What `cubeloom train` would be given; weights have no float32 masters, as the peers' have none."""
    base = Job(
        model=ModelSettings(preset="gpt-tiny", **our_sizes(size)),
        device=kind,
        folder=folder / "run",
        optimizer=OptimizerSettings(fp32_master_weights=False),
        num_comm_channels=devices.num_comm_channels(kind, plan.grid.world),
    )
    job = planned_job(answer, plan, base)
    check(job)
    return job


def step_ms(pool: RankPool, job: Job, steps: int) -> float:
    """The median over steps, each as long as for its slowest rank."""
    return 1e3 * median(pool.run(job.grid.world, step_times, job, steps, job.num_comm_channels or 1, timeout=300)[0])


def peers_timed(size: Size, kind: devices.Kind, ranks: int, steps: int) -> list[Timed]:
    network = Network(Grid(y=ranks), devices.current(kind))
    dtype = number_type(kind)
    tokens, targets = tokens_of(size, network.device)
    values = peer.weights(size, dtype, network.device)
    recipes: dict[str, Step] = {
        name: sharded.step(name, size, values, network.mesh["y"], tokens, targets) for name in sharded.RECIPES
    }
    for name, recipe in schedules.RECIPES.items():
        stages = ranks * recipe.stages_per_rank
        if size.samples >= recipe.least * ranks and size.layers % stages == 0:
            recipes[name] = schedules.whole_steps(name, size, dtype, network.rank, ranks, tokens, targets)
    return take_turns(recipes, network.device, 1, steps, network.barrier)


def as_json(plan: Plan, ms: float) -> dict[str, Any]:
    return {
        "grid": str(plan.grid),
        "schedule": plan.shape.title,
        "microbatches": plan.microbatches,
        "rest": plan.rest,
        "ways": plan.ways,
        "predicted_ms": round(1e3 * plan.seconds, 2),
        "measured_ms": round(ms, 2),
    }


def told(console: Console, rows: list[tuple[Plan, float]], peers: list[Timed]) -> int:
    table = Table("planner's rank", "grid", "schedule", "rest", "ways", "predicted ms", "measured ms")
    for place, (plan, ms) in enumerate(rows):
        what = str(plan.grid), f"{plan.shape.title}, {plan.microbatches}", plan.rest, str(plan.ways)
        table.add_row(str(place + 1), *what, f"{1e3 * plan.seconds:.1f}", f"{ms:.1f}")
    for each in sorted(peers, key=lambda one: one.step_ms):
        table.add_row("", each.name, "", "", "", "", f"{each.step_ms:.1f}")
    console.print(table)
    fastest = min(range(len(rows)), key=lambda place: rows[place][1])
    best_peer = min(each.step_ms for each in peers)
    found = {
        "measured": len(rows),
        "place_of_fastest": fastest + 1,
        "regret": rows[0][1] / rows[fastest][1] - 1,
        "first_over_best_torch": best_peer / rows[0][1],
    }
    print(json.dumps(found))
    return int(fastest > 2)


if __name__ == "__main__":
    sys.exit(tyro.cli(Planned)(Console(width=None if sys.stdout.isatty() else 150)))
