"""What the weave hides: steps of a GPT on a network as slow as its computation, with one, two and four strands.

    python bench/weave.py [--quick]

Two ranks with a core each compute for real; every communication is held back by a wire whose speed is set so that one step
is as long on the wire as in computation. Strands in turns within one run, so that a noisy machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from cubeloom import Grid
from cubeloom.comm import CommTrace, Network, SimulatedLink
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, build, cut_of
from cubeloom.parallel import Batch, CubeState, ShardingPolicy, apply, initial_values
from cubeloom.parallel.weave import Weave

GRID = Grid(y=2)
Mode = Literal["replicated", "sharded"]


@dataclass(frozen=True)
class Setting:
    ways: int
    hides: bool  # weight gradients behind the input gradient's collective

    def __str__(self) -> str:
        return f"ways = {self.ways}, weight gradient {'behind' if self.hides else 'before'} the collective"


@dataclass(frozen=True)
class Measured:
    step: float
    hidden_forward: float  # the share of the time on the wire in which this rank computed
    hidden_backward: float


SETTINGS = [Setting(1, False), Setting(2, False), Setting(1, True), Setting(2, True), Setting(4, True)]


def measure(mode: Mode, size: GPTConfig, batch: Batch, settings: list[Setting], rounds: int) -> list[Measured]:
    """Each setting's median over the rounds, on this rank."""
    tokens = (torch.arange(batch.samples * batch.sequence) % size.vocab).view(batch.samples, batch.sequence)
    speed = _as_slow_as_computation(mode, size, batch, tokens)
    network = Network(GRID, wire=SimulatedLink(speed))
    model, state = _model(network, mode, size, batch)
    found: dict[Setting, list[Measured]] = {setting: [] for setting in settings}
    for _ in range(rounds + 1):
        for setting in settings:
            state.hides_weight_gradients = setting.hides
            found[setting].append(_step(network, Weave(model, setting.ways, state.staggers), tokens))
    return [_middle(each[1:]) for each in found.values()]  # the first warms up


def _model(network: Network, mode: Mode, size: GPTConfig, batch: Batch) -> tuple[torch.nn.Module, CubeState]:
    with torch.device("meta"):
        model = build(size)
    least = Batch(batch.samples // 4, batch.sequence)
    fill = initial_values(model, 0, torch.float32)
    return model, apply(model, cut_of(model), network, least, fill, ShardingPolicy(activations=mode))


def _step(network: Network, woven: Weave, tokens: torch.Tensor) -> Measured:
    network.barrier()
    start = time.perf_counter()
    with network.timing() as forward:
        loss = woven(tokens=tokens, targets=tokens)
    with network.timing() as backward:
        loss.backward()
    return Measured(time.perf_counter() - start, _hidden(forward), _hidden(backward))


def _hidden(journal: CommTrace) -> float:
    on_wire = sum(transfer.duration for transfer in journal.transfers)
    blocked = sum(transfer.blocked for transfer in journal.transfers)
    return 1 - blocked / on_wire if on_wire else 0.0


def _as_slow_as_computation(mode: Mode, size: GPTConfig, batch: Batch, tokens: torch.Tensor) -> float:
    """Bytes a second at which a step's communication takes as long as its computation. The same on both ranks."""
    network = Network(GRID)
    model, _ = _model(network, mode, size, batch)
    computing = []
    for _ in range(4):
        start = time.perf_counter()
        with network.timing() as journal:
            model(tokens=tokens, targets=tokens).backward()
        computing.append(time.perf_counter() - start - sum(transfer.blocked for transfer in journal.transfers))
    moved = sum(float(transfer.entry.received) for transfer in journal.transfers)
    slower = network.axis("y").all_reduce(torch.tensor(median(computing[1:])), largest=True).wait()
    return moved / slower.item()


def _middle(runs: list[Measured]) -> Measured:
    return Measured(
        median(run.step for run in runs),
        median(run.hidden_forward for run in runs),
        median(run.hidden_backward for run in runs),
    )


def table(mode: Mode, measured: dict[Setting, Measured]) -> Table:
    shown = Table(title=f"activations at rest {mode}: communication as long as computation, {GRID}")
    for heading in (
        "",
        "step ms",
        "hidden forward",
        "hidden backward",
        "over ways = 1 alike",
        "over the best of ways = 1",
    ):
        shown.add_column(heading, justify="left" if not heading else "right")
    best = measured[Setting(1, True)].step
    for setting, run in measured.items():
        alike = measured[Setting(1, setting.hides)].step
        shown.add_row(
            str(setting),
            f"{1000 * run.step:.0f}",
            f"{run.hidden_forward:.0%}",
            f"{run.hidden_backward:.0%}",
            f"{alike / run.step:.2f}x",
            f"{best / run.step:.2f}x",
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, two rounds")
    quick = parser.parse_args().quick
    size = GPTConfig(vocab=256, positions=64, hidden=256 if quick else 512, layers=2 if quick else 8, heads=8)
    console = Console(width=None if sys.stdout.isatty() else 140)
    modes: list[Mode] = ["replicated", "sharded"]
    with RankPool(GRID.world) as pool:
        for mode in modes:
            ranks = pool.run(GRID.world, measure, mode, size, Batch(16, 64), SETTINGS, 2 if quick else 7, timeout=900)
            slowest = [max(runs, key=lambda run: run.step) for runs in zip(*ranks, strict=True)]
            console.print(table(mode, dict(zip(SETTINGS, slowest, strict=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
