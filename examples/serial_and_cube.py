"""Train one small GPT twice, in one process and on a cube of eight, and see that it is the same training.

    python examples/serial_and_cube.py
    python examples/serial_and_cube.py --grid data=2,z=2,y=2 --steps 120       # another grid, longer

The text is the source of Python's own standard library, a token for each byte, so nothing is downloaded. This file is
also the tutorial: how a plain model is built, cut over a grid of processes, trained and measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch
import tyro
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPT, GPTConfig, cut_of
from cubeloom.parallel import (
    Batch,
    ParallelConfig,
    ShardingPolicy,
    apply,
    initial_values,
    materialise,
    resolve,
    step_volume,
)
from drawing import plot, progress, table
from text import draw, standard_library

DTYPE, SEED = torch.float32, 0
NEXT = """
Next: the same in float64, compared to the last digits, on any grid and model:
  cubeloom verify --model llama-tiny --grid z=2,y=3
then docs/cube.md, which says how a model lies on the cube."""


@dataclass(frozen=True)
class Job:
    """What to train, the same in both runs. The batch is that of one step, over all processes together."""

    model: GPTConfig
    batch: Batch
    steps: int


FULL = Job(GPTConfig(vocab=256, positions=64, hidden=192, layers=2, heads=8), Batch(samples=24, sequence=64), 60)
QUICK = Job(GPTConfig(vocab=256, positions=64, hidden=64, layers=1, heads=8), Batch(samples=8, sequence=16), 4)


@dataclass
class Result:
    """What one process tells when it is done."""

    losses: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)  # bytes that this process holds
    received: dict[str, float] = field(default_factory=dict)  # bytes from other processes in a step, by axis


# 1. Two functions that run on ranks. They are ordinary code: the pool calls them in each of its processes.


def train_serially(job: Job) -> Result:
    # On the meta device a model has shapes and no values, whatever its size.
    with torch.device("meta"):
        model = GPT(job.model)
    # A value depends on seed, name and place alone: the serial model and every grid start from the same numbers.
    materialise(model, initial_values(model, SEED, DTYPE))
    return train(model, job, share=lambda whole: whole, progress_of="serial")


def train_on(grid: Grid, job: Job) -> Result:
    network = Network(grid)  # joins the processes of this job into the grid
    with torch.device("meta"):
        model = GPT(job.model)
    # The cut is data beside the model: which layers expand from x to y, which contract back, where the heads are.
    # `apply` replaces each layer by its form on the grid, in place. No rank ever holds a whole matrix.
    apply(model, cut_of(model), network, job.batch, initial_values(model, SEED, DTYPE), ShardingPolicy())
    with network.recording() as ledger:  # every communication inside is written down; outside it costs nothing
        # Samples are cut over data and z. Ranks along x and y get the same ones and share the work on each.
        result = train(model, job, network.share, progress_of=f"on {grid}" if network.rank == 0 else None)
    result.received = {axis: float(size / job.steps) for axis, size in ledger.by_axis().items()}
    return result


# 2. The training loop knows nothing of grids. Parameters are DTensors, and torch's own AdamW works on them as they are.


def train(model: nn.Module, job: Job, share: Callable[[Tensor], Tensor], progress_of: str | None) -> Result:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    text, result = standard_library(), Result()
    with progress(progress_of or "", job.steps, shown=progress_of is not None) as advance:
        for step in range(job.steps):
            tokens, targets = draw(text, job.batch, SEED, step)
            optimizer.zero_grad()
            with activations_of(model) as activations:
                loss = model(share(tokens), share(targets))  # on every rank the mean over the whole batch
            loss.backward()  # when it returns, gradients have been summed over their replicas
            optimizer.step()
            warm_up.step()
            result.losses.append(loss.item())
            advance(result.losses[-1])
    parameters = list(model.parameters())
    result.memory = {
        "parameters": held(parameters),
        "gradients": held(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer state": held(tensor for state in optimizer.state.values() for tensor in state.values()),
        "activations at rest": sum(activations.values()),
    }
    return result


# 3. What we measure.


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes on this rank: a DTensor knows the shape of the whole, and holds a block of it."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


@contextmanager
def activations_of(model: nn.Module) -> Iterator[dict[str, int]]:
    """Bytes of what each layer hands to the next. `apply` keeps the names of layers, so the two models compare."""
    sizes: dict[str, int] = {}
    names = {module: name for name, module in model.named_modules() if not any(module.children())}

    def note(layer: nn.Module, _: object, output: Tensor) -> None:
        sizes[names[layer]] = output.nbytes

    hooks = [layer.register_forward_hook(note) for layer in names]
    yield sizes
    for hook in hooks:
        hook.remove()


# 4. Run both, and show them side by side.


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train a small GPT serially and on a grid of local processes, and compare."""

    grid: str = "x=2,y=2,z=2"
    """Sizes of the axes data, z, y, x; those not named are 1."""
    steps: int = FULL.steps
    quick: bool = False
    """A smaller model and four steps, for our tests."""
    json: bool = False
    """Print one JSON object as the last line."""

    def __call__(self) -> None:
        if self.steps < 1:
            raise UserError(f"--steps must be at least 1, got {self.steps}")
        grid, job = Grid.parse(self.grid), QUICK if self.quick else replace(FULL, steps=self.steps)
        with torch.device("meta"):
            plain = GPT(job.model)
        # Before any process starts: a grid that cannot work is refused here, with the nearest that do.
        specs = resolve(plain, cut_of(plain), grid, ShardingPolicy(), job.batch)
        closed_form = step_volume(specs, ParallelConfig.exact(grid, ShardingPolicy(), job.batch, DTYPE.itemsize))
        patience = 60 + 10 * job.steps  # seconds until a rank that does not answer is given up
        with RankPool(grid.world) as pool:
            (serial,) = pool.run(1, train_serially, job, timeout=patience)
            ranks = pool.run(grid.world, train_on, grid, job, timeout=patience)
        predicted = {axis: float(size) for axis, size in closed_form.items()}
        show(grid, serial, ranks, predicted)
        if self.json:
            print(json.dumps({"serial": asdict(serial), "grid": asdict(ranks[0]), "predicted": predicted}))


def show(grid: Grid, serial: Result, ranks: list[Result], predicted: dict[str, float]) -> None:
    console, first, last = Console(), ranks[0], len(serial.losses) - 1
    steps = sorted({*range(0, last, max(1, last // 8)), last})
    pairs = [(step, serial.losses[step], first.losses[step]) for step in steps]
    losses = [(str(step), f"{one:.5f}", f"{many:.5f}", f"{abs(one - many):.0e}") for step, one, many in pairs]
    console.print(table("\nLoss", ("step", "serial", f"on {grid}", "difference"), losses))
    console.print(plot(serial.losses, first.losses), highlight=False)
    most = {what: max(rank.memory[what] for rank in ranks) for what in serial.memory}
    sizes = [(what, f"{one:,}", f"{most[what]:,}", f"1/{one / most[what]:.2f}") for what, one in serial.memory.items()]
    console.print(table("\nMemory in bytes", ("", "serial", "largest rank", "share"), sizes))
    axes = sorted(first.received.keys() | predicted.keys())
    received = [(axis, f"{first.received.get(axis, 0):,.0f}", f"{predicted.get(axis, 0):,.0f}") for axis in axes]
    console.print(table("\nBytes received by rank 0 in a step", ("along", "counted", "by closed form"), received))
    console.print(NEXT, highlight=False)


if __name__ == "__main__":
    try:
        tyro.cli(Demo)()
    except UserError as error:
        print(f"serial_and_cube: {error}", file=sys.stderr)
        sys.exit(2)
