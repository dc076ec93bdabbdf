"""Speed on one GPU beside what torch alone does there, in one run, as ratios.

    OMP_NUM_THREADS=1 python bench/gpu.py one       # one rank: whole steps of GPT 350M and 1.3B; with --sizes also Llama
    OMP_NUM_THREADS=1 python bench/gpu.py pipe      # ranks that share the GPU: pipelines, forward and backward only
    OMP_NUM_THREADS=1 python bench/gpu.py tp        # ranks that share the GPU: tensor parallelism, whole steps
    OMP_NUM_THREADS=1 python bench/gpu.py rank      # rank 0 of FSDP 64, TP 8, pipe=8, ..., alone: a step without the network
    OMP_NUM_THREADS=1 python bench/gpu.py overlap   # the same, in one and two strands: what is hidden of their parts

With `--cpu --quick` each is tiny, to see that it runs. Recipes take turns, a few steps each and several rounds, so that a chip
that gets warm slows all of them down alike. Every step is timed by itself, from a device that has settled to one that has;
given is the median, of several ranks that of the slowest in each step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console

from cubeloom import Grid, UserError
from cubeloom.comm import Network, devices
from cubeloom.launch import run
from cubeloom.launch.share_gpu import sharing
from cubeloom.parallel import ShardingPolicy

sys.path.insert(0, str(Path(__file__).parents[1]))  # `bench` is found also where this file is run by its name
from bench import energy, overlap, rank, traced
from bench.one import ALL, CHOSEN, measure_one
from bench.one import RECIPES as RECIPES
from bench.ours import number_type, our_step, tokens_of
from bench.peers import gpt as peer
from bench.peers import schedules, sharded
from bench.peers.gpt import Size
from bench.peers.llama import LlamaSize
from bench.peers.recipes import PEER as PEER
from bench.peers.recipes import AnySize, missing
from bench.peers.schedules import Stacked
from bench.peers.timing import Compared, Step, Timed, slowest, take_turns
from bench.stacked import our_passes

SIZES = {
    "350M": Size(layers=24, hidden=1024, heads=16, sequence=1024, samples=16),
    "1.3B": Size(layers=24, hidden=2048, heads=16, sequence=2048, samples=8),
}
HALVED = {name: replace(size, samples=size.samples // 2) for name, size in SIZES.items()}
# Blocks that compute for about half as long as their sums take where ranks share a GPU: those of 350M do for a tenth.
WIDE = Size(layers=2, hidden=8192, heads=64, sequence=1024, samples=4, vocab=8192)
OVERLAPPED = {**HALVED, "wide": WIDE}
TINY = Size(layers=2, hidden=32, heads=4, sequence=16, samples=4, vocab=64)
# Of the proportions of Llama 3: one that recipes fit a GPU with together, and one that each fills alone.
LLAMAS = {
    "llama-1B": LlamaSize(
        layers=16, hidden=2048, heads=32, kv_heads=8, mlp_hidden=8192, sequence=4096, samples=4, vocab=128256
    ),
    "llama-8B": LlamaSize(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        mlp_hidden=14336,
        sequence=4096,
        samples=2,
        vocab=128256,
        apart=True,
    ),
}
TINY_LLAMA = LlamaSize(
    layers=2, hidden=32, heads=4, kv_heads=2, mlp_hidden=48, sequence=16, samples=4, vocab=64, apart=True
)
# How stages of a pipeline run.
PLAIN: dict[str, dict[str, bool]] = {"": {}}
RECORDED = {**PLAIN, ", recorded": {"record": True}}
COMPILED = {**RECORDED, ", compiled, recorded": {"record": True, "compiled": True}}
OUR_SCHEDULES = ("1f1b", "zb-h1", "zbv", "chimera", "chimera-zb")
OUR_CUBES = {"cubeloom y, replicated": "replicated", "cubeloom y, sharded": "sharded"}  # activations at rest
WAYS = {"": 1, ", two strands": 2}


def measure_pipe(
    size: Stacked,
    kind: devices.Kind,
    ranks: int,
    count: int,
    names: tuple[str, ...],
    ways: dict[str, dict[str, bool]],
    rounds: int,
    steps: int,
) -> list[Timed]:
    """On this rank, with so many micro-batches of one sequence each.

    `ways`: how our stages run, by what that adds to a name.
    """
    network = Network(Grid(pipe=ranks), devices.current(kind))
    numbers = torch.Generator(network.device).manual_seed(0)
    shape = count, size.sequence
    x = torch.randn(*shape, size.hidden, generator=numbers, device=network.device).to(number_type(kind))
    targets = torch.randint(size.classes, shape, generator=numbers, device=network.device)
    recipes: dict[str, Step] = {
        name: schedules.passes(name, size, network.rank, ranks, x, targets)
        for name, recipe in schedules.RECIPES.items()
        if count >= recipe.least * ranks
    }
    for name in names:
        for words, how in ways.items():
            recipes[f"cubeloom {name}{words}"] = our_passes(name, size, network, {"x": x, "targets": targets}, **how)
    return take_turns(recipes, network.device, rounds, steps, network.barrier)


def measure_tp(size: Size, kind: devices.Kind, ranks: int, rounds: int, steps: int) -> list[Timed]:
    network = Network(Grid(y=ranks), devices.current(kind), num_comm_channels=devices.num_comm_channels(kind, ranks))
    values = peer.weights(size, number_type(kind), network.device)
    batch = tokens_of(size, network.device)
    mesh = network.mesh["y"]
    recipes: dict[str, Step] = {name: sharded.step(name, size, values, mesh, *batch) for name in sharded.RECIPES}
    for name, activations in OUR_CUBES.items():
        rest = ShardingPolicy(activations=activations)  # type: ignore[arg-type]
        for strands, ways in WAYS.items():
            recipes[name + strands] = our_step(size, values, network, rest, ways=ways)
    return take_turns(recipes, network.device, rounds, steps, network.barrier)


def measure_overlap(
    size: Size, kind: devices.Kind, ranks: int, trace: Path | None, rounds: int, steps: int
) -> list[Timed]:
    """Whole steps in one and two strands, their parts, and a bare pair, in turns of one step; and a trace of two strands."""
    network = Network(Grid(y=ranks), devices.current(kind), num_comm_channels=devices.num_comm_channels(kind, ranks))
    values = peer.weights(size, number_type(kind), network.device)
    on_cpu = kind == devices.CPU

    def ours(ways: int = 1) -> Step:
        return our_step(size, values, network, ShardingPolicy(activations="replicated"), compiled=True, ways=ways)

    with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
        recipes: dict[str, Step] = {}
        sums: dict[str, Step] = {}
        for alone, (strands, ways) in zip((overlap.SUMS, overlap.HALVES), WAYS.items(), strict=True):
            recipes[f"a step{strands}"] = step = ours(ways)
            with network.recording() as ledger:
                step()
            sums[alone] = overlap.sums_of(network, ledger)
        recipes |= {**sums, overlap.COMPUTING: overlap.without_sums(ours())}
        recipes |= overlap.bare_pair(network, 64 if on_cpu else 4096, 2**12 if on_cpu else 2**24)
        timed = take_turns(recipes, network.device, rounds * steps, 1, network.barrier)
        if trace is not None:
            traced.write(recipes["a step, two strands"], network.device, trace if network.rank == 0 else None)
        return timed


@dataclass(frozen=True, kw_only=True)
class Common:
    rounds: int = 4
    steps: int = 5
    """Of each recipe in a round."""
    cpu: bool = False
    quick: bool = False
    """A tiny model and few steps, for our tests."""

    @property
    def kind(self) -> devices.Kind:
        return "cpu" if self.cpu else "cuda"

    @property
    def turns(self) -> tuple[int, int]:
        return (1, 2) if self.quick else (self.rounds, self.steps)

    def ranks_run(self, ranks: int, function: Callable[..., list[Timed]], *arguments: Any) -> list[Timed]:
        """On ranks that share the GPUs there are; the slowest's times."""
        with sharing(ranks, self.kind):
            return slowest(run(ranks, function, *arguments, *self.turns, device=self.kind, timeout=1200))


@dataclass(frozen=True, kw_only=True)
class One(Common):
    """One rank: a whole training step of GPT or Llama with AdamW, ours beside the strongest recipes of torch."""

    sizes: tuple[Literal["350M", "1.3B", "llama-1B", "llama-8B"], ...] = ("350M", "1.3B")
    recipes: tuple[str, ...] = CHOSEN
    """Those whose packages are missing are left out. There are more: two recordings of 1.3B and all else hardly fit a GPU of
    140 GB together."""
    profile: bool = False
    """Say also how long kernels of each kind ran in a step, and which ran longest in the fastest of ours and of the peers."""
    energy: bool = False
    """Say also what a step costs in joules, and at what clock the chip ran; where there is a GPU, that has a counter for it."""

    def __call__(self, console: Console) -> list[Compared]:
        if unknown := [name for name in self.recipes if name not in ALL]:
            raise UserError(f"there is no recipe {unknown[0]!r}; there are: {'; '.join(ALL)}")
        left_out = {name: why for name in self.recipes if (why := missing(name, not self.cpu))}
        for why in left_out.values():
            console.print(f"left out: {why}", soft_wrap=True)
        recipes = tuple(name for name in self.recipes if name not in left_out)
        found: list[Compared] = []
        for title, size in self._titled():
            arguments = title, size, self.kind, recipes, *self.turns, self.profile, self.energy and not self.cpu
            found += run(1, measure_one, *arguments, device=self.kind, timeout=1200)
            _show(found[-1], console, self.profile)
            if found[-1].costs:
                console.print(energy.cost_table(found[-1].costs, energy.Chip().limits()))
        return found

    def _titled(self) -> Iterator[tuple[str, AnySize]]:
        known: dict[str, AnySize] = {**SIZES, **LLAMAS}
        quick = dict.fromkeys("llama" if name in LLAMAS else "GPT" for name in self.sizes)
        tiny: dict[str, AnySize] = {"GPT tiny": TINY, "llama tiny": TINY_LLAMA}
        chosen = (
            {f"{each} tiny": tiny[f"{each} tiny"] for each in quick}
            if self.quick
            else {name if name in LLAMAS else f"GPT {name}": known[name] for name in self.sizes}
        )
        for name, size in chosen.items():
            yield f"{name}, {size.samples} × {size.sequence} tokens, {self.kind}", size


@dataclass(frozen=True, kw_only=True)
class Pipe(Common):
    """Ranks that share the GPU: forward and backward of a stack of blocks, our runtime beside torch's schedules."""

    ranks: int = 4
    microbatches: tuple[int, ...] = (4, 8, 16)
    schedules: tuple[str, ...] = OUR_SCHEDULES
    compiled: bool = False
    """Also with compiled blocks, on a GPU; of all recipes at once one of 140 GB then holds those of two schedules."""

    def __call__(self, console: Console) -> list[Compared]:
        size = Stacked(blocks=8, hidden=16, heads=2, sequence=8, classes=8) if self.quick else Stacked()
        on_gpu = COMPILED if self.compiled else RECORDED
        ways = PLAIN if self.cpu else on_gpu  # a CPU records nothing
        found = []
        for count in (2 * self.ranks,) if self.quick else self.microbatches:
            timed = self.ranks_run(self.ranks, measure_pipe, size, self.kind, self.ranks, count, self.schedules, ways)
            best = min((each for each in timed if each.name.startswith("torch")), key=lambda each: each.step_ms)
            title = f"{size.blocks} blocks of {size.hidden} on {self.ranks} ranks, N={count}, {self.kind}"
            found.append(Compared(title, timed, best.name, count * size.sequence, count * size.teraflops))
            console.print(found[-1].table())
        return found


@dataclass(frozen=True, kw_only=True)
class Tp(Common):
    """Ranks that share the GPU: whole steps of GPT, cut over y, beside torch's DTensor and FSDP2."""

    ranks: int = 4
    sizes: tuple[str, ...] = tuple(SIZES)

    def __call__(self, console: Console) -> list[Compared]:
        found = []
        for name, size in ({"tiny": TINY} if self.quick else {name: HALVED[name] for name in self.sizes}).items():
            timed = self.ranks_run(self.ranks, measure_tp, size, self.kind, self.ranks)
            title = f"GPT {name}, {size.samples} × {size.sequence} tokens, {self.ranks} ranks, {self.kind}"
            # Each of ours beside the peer that cuts as it does.
            for theirs, ours in zip(sharded.TENSOR, OUR_CUBES, strict=True):
                alike = [
                    each for each in timed if each.name in (theirs, *sharded.SHARDED) or each.name.startswith(ours)
                ]
                found.append(Compared(title, alike, theirs, size.tokens, size.teraflops))
                console.print(found[-1].table())
        return found


@dataclass(frozen=True, kw_only=True)
class Overlap(Common):
    """Ranks that share the GPU: how much of computing and communicating a step in two strands hides behind each other."""

    ranks: int = 4
    sizes: tuple[str, ...] = tuple(OVERLAPPED)
    traces: Path | None = None
    """A folder, made if need be, for the profiler's traces of rank 0: one step in two strands of each size."""

    def __call__(self, console: Console) -> list[overlap.Hidden]:
        if self.traces is not None:
            self.traces.mkdir(parents=True, exist_ok=True)
        found = []
        for name in ("tiny",) if self.quick else self.sizes:
            size = TINY if self.quick else OVERLAPPED[name]
            title = f"GPT {name}, {size.samples} × {size.sequence} tokens, {self.ranks} ranks, {self.kind}"
            trace = self.traces and self.traces / f"{name}.json.gz"
            timed = self.ranks_run(self.ranks, measure_overlap, size, self.kind, self.ranks, trace)
            found.append(overlap.Hidden(title, timed))
            console.print(found[-1].table())
            if trace is not None:
                console.print(f"{trace}: {traced.Shown.of(trace)}", soft_wrap=True)
        return found


@dataclass(frozen=True, kw_only=True)
class Rank(Common):
    """Rank 0 of a large job, alone: a step of some blocks of Llama 3 with table, head and AdamW, and no network."""

    sizes: tuple[Literal["8B", "70B"], ...] = ("8B", "70B")
    jobs: tuple[str, ...] = tuple(rank.JOBS)
    profile: bool = False
    """As of `one`."""

    def __call__(self, console: Console) -> list[Compared]:
        found = []
        for name, size in (
            {"tiny": rank.TINY}.items() if self.quick else ((each, rank.SIZES[each]) for each in self.sizes)
        ):
            for job in self.jobs:
                title = f"rank 0 of {job}, {size.layers} blocks of Llama {name}, {self.kind}"
                found.append(rank.measure(title, rank.JOBS[job], size, self.kind, *self.turns, profiled=self.profile))
                _show(found[-1], console, self.profile)
        return found


def _show(found: Compared, console: Console, profiled: bool) -> None:
    for why in found.failed:
        console.print(f"left out: {why}", soft_wrap=True, markup=False)
    console.print(found.table())
    if profiled:
        console.print(found.kernel_table())
        for each in found.fastest("torch", "cubeloom"):
            console.print(each.longest_table())


def main(arguments: list[str] | None = None) -> int:
    chosen = tyro.extras.subcommand_cli_from_dict(
        {"one": One, "pipe": Pipe, "tp": Tp, "overlap": Overlap, "rank": Rank}, args=arguments
    )
    assert isinstance(chosen, One | Pipe | Tp | Overlap | Rank)
    for each in chosen(Console(width=None if sys.stdout.isatty() else 140)):
        print(json.dumps(asdict(each)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
