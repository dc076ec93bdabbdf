"""The pipeline runtime beside its simulator and beside torch's own runtime.

    python bench/pipeline.py [--quick]

First every schedule on D = 4 and 8 ranks whose computation is a timed wait: the step as measured beside the step as
simulated, under the same costs. Then what the runtime itself costs: 1F1B of a stage that computes next to nothing, per
action, in our runtime and in torch.distributed.pipelining, in turns on the same ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.parallel import CubeState, ShardingPolicy
from cubeloom.parallel.gradients import Gradients
from cubeloom.pipeline import Action, Costs, Schedule, generate, simulate
from cubeloom.pipeline.runtime.channels import Channels, Shape
from cubeloom.pipeline.runtime.interpreter import Interpreter
from cubeloom.pipeline.runtime.stage import Carry, Stage
from cubeloom.tools.emulate import EmulatedPipeline

FORWARD = 0.03  # seconds; a whole backward takes twice that
WIDTH = 8  # of the stage that computes next to nothing


def schedules(workers: int) -> list[Schedule]:
    d = workers
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("gpipe", d, {}),
        ("1f1b", d, {}),
        ("interleaved", d, {}),
        ("gems", d, {}),
        ("zb-h1", d, {}),
        ("zb-h2", 2 * d, {}),
        ("zbv", 2 * d, {}),
        ("dualpipe", 2 * d, {}),
        ("dualpipev", 2 * d, {}),
        ("hanayo", d, {}),
        ("pipedream", d, {}),
        ("pipedream-2bw", d, {}),
        ("chimera", d, {}),
        ("chimera", 2 * d, {"pairs": 2}),
        ("chimera", 2 * d, {"mode": "doubling"}),
        ("chimera", 2 * d, {"mode": "halving"}),
        ("chimera-zb", d, {}),
        ("auto", d, {"tries": 20}),
    ]
    return [generate(name, d, n, **options) for name, n, options in named]


def measure(schedule: Schedule, costs: Costs, repeats: int) -> float:
    """Seconds of a step on this rank: the median, after one to warm up."""
    pipeline = EmulatedPipeline(schedule, costs, Network(Grid(pipe=len(schedule.workers))))
    return median([pipeline.step() for _ in range(repeats + 1)][1:])


@dataclass(frozen=True)
class Timing:
    schedule: Schedule
    simulated: float
    measured: float

    @property
    def difference(self) -> float:
        return self.measured / self.simulated - 1


def against_simulator(pool: RankPool, depths: list[int], repeats: int) -> list[Timing]:
    found = []
    for depth in depths:
        for schedule in schedules(depth):
            costs = Costs.like(schedule, FORWARD, FORWARD, FORWARD)
            measured = max(pool.run(depth, measure, schedule, costs, repeats))
            found.append(Timing(schedule, simulate(schedule, costs).makespan, measured))
    return found


class _Stages:
    """One real stage, with autograd, behind the interpreter."""

    def __init__(self, stage: Stage, microbatches: list[Tensor]) -> None:
        self._stage = stage
        self._microbatches = microbatches

    def forward(self, action: Action, inputs: Carry) -> Carry:
        carry = inputs or {"x": self._microbatches[action.microbatch]}
        return self._stage.forward((action.microbatch, None), carry, {})

    def backward(self, action: Action, gradients: Carry) -> Carry:
        return self._stage.backward((action.microbatch, None), gradients)

    def other(self, action: Action) -> None:
        raise AssertionError(f"1F1B has no {action}")


def overheads(workers: int, microbatches: int, rounds: int) -> tuple[float, float]:
    """Seconds a step of ours and of torch's takes on this rank: the medians over rounds, in turns."""
    network = Network(Grid(pipe=workers))
    rank, device = network.rank, torch.device("cpu")
    schedule = generate("1f1b", workers, microbatches)
    batch = torch.randn(microbatches, WIDTH)
    module = nn.Linear(WIDTH, WIDTH)
    last = rank == workers - 1

    def run(carry: Carry, _: object) -> Carry:
        y = module(carry["x"])
        return {"loss": y.pow(2).mean()} if last else {"x": y}

    channels = Channels(network, schedule)
    boundaries = {stage: {"x": Shape((1, WIDTH), torch.float32)} for stage in range(workers)}
    work = _Stages(Stage([run], CubeState(network, ShardingPolicy(), Gradients())), list(batch.split(1)))

    def ours() -> None:
        Interpreter(work, channels, boundaries, workers, f"rank {rank}").run(channels.steps)

    theirs_schedule = Schedule1F1B(
        PipelineStage(nn.Linear(WIDTH, WIDTH), rank, workers, device),
        microbatches,
        loss_fn=lambda y, _: y.pow(2).mean(),
    )

    def theirs() -> None:
        target: dict[str, Any] = {"target": batch} if last else {}
        theirs_schedule.step(*([batch] if rank == 0 else []), **target)

    times: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * (rounds + 1)):  # the first of each warms up
        network.barrier()
        start = time.perf_counter()
        (theirs if number % 2 else ours)()
        times[number % 2].append(time.perf_counter() - start)
    return median(times[0][1:]), median(times[1][1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four ranks only, and fewer repeats")
    quick = parser.parse_args().quick
    console = Console(width=None if sys.stdout.isatty() else 120)
    with RankPool(4 if quick else 8) as pool:
        timings = against_simulator(pool, [4] if quick else [4, 8], repeats=1 if quick else 3)
        console.print(timings_table(timings))
        worst = max(timings, key=lambda timing: abs(timing.difference))
        console.print(f"largest difference: {worst.difference:+.1%} ({worst.schedule.name})")
        for workers in [2] if quick else [2, 4, 8]:
            steps = pool.run(workers, overheads, workers, 16, 10 if quick else 60)
            console.print(overhead_line(workers, 16, steps))
    return 0


def timings_table(timings: list[Timing]) -> Table:
    table = Table(title=f"steps of timed waits, F = I = W = {FORWARD * 1000:g} ms: simulated and measured")
    for heading in ("schedule", "D", "N", "simulated ms", "measured ms", "difference"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for timing in timings:
        schedule = timing.schedule
        table.add_row(
            schedule.name + (f" ({schedule.replicas} replicas)" if schedule.replicas > 2 else ""),
            str(len(schedule.workers)),
            str(schedule.microbatches),
            f"{1000 * timing.simulated:.1f}",
            f"{1000 * timing.measured:.1f}",
            f"{timing.difference:+.1%}",
        )
    return table


def overhead_line(workers: int, microbatches: int, steps: list[tuple[float, float]]) -> str:
    """A rank has two actions a micro-batch; the slowest rank's step counts."""
    ours, theirs = (max(step[which] for step in steps) / (2 * microbatches) * 1e6 for which in (0, 1))
    return (
        f"1F1B, {workers} ranks, {microbatches} micro-batches, next to no computation: "
        f"ours {ours:.0f} us an action, torch {theirs:.0f} us, ratio {ours / theirs:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
