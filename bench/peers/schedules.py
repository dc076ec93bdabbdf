"""Torch's own pipelines: of a stack of blocks, forward and backward only; and of GPT, whole steps with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from bench.peers.gpt import Block, Size, adamw, mean_loss


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """Blocks, and a light head with a loss at their end; a micro-batch is one sequence."""

    blocks: int = 32
    hidden: int = 2048
    heads: int = 16
    sequence: int = 1024
    classes: int = 256

    @property
    def teraflops(self) -> float:
        """Of one micro-batch, attention in full."""
        return 72e-12 * self.sequence * self.blocks * self.hidden**2 * (1 + self.sequence / (6 * self.hidden))


@dataclass(frozen=True)
class Recipe:
    schedule: type[Any]
    stages_per_rank: int = 1
    v: bool = False  # the second stage of a rank lies on the way back
    least: int = 1  # micro-batches per rank
    compiled: bool = False  # each block

    def stages(self, rank: int, ranks: int) -> list[int]:
        return (
            [rank, 2 * ranks - 1 - rank] if self.v else [rank + place * ranks for place in range(self.stages_per_rank)]
        )


EAGER = {
    "torch 1F1B": Recipe(schedules.Schedule1F1B),
    "torch ZB1P": Recipe(schedules.ScheduleInterleavedZeroBubble),
    "torch ZBV": Recipe(schedules.ScheduleZBVZeroBubble, 2, v=True),
    "torch DualPipeV": Recipe(schedules.ScheduleDualPipeV, 2, v=True, least=2),
}
RECIPES = EAGER | {f"{name}, compiled": replace(recipe, compiled=True) for name, recipe in EAGER.items()}


class Part(nn.Module):
    """Some of the blocks, and perhaps the head."""

    def __init__(self, size: Stacked, blocks: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size.hidden, size.heads) for _ in blocks)
        last = blocks.stop == size.blocks
        self.head = nn.Sequential(nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.classes)) if last else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class GPTPart(nn.Module):
    """Some of GPT's blocks, with what comes before the first or after the last."""

    def __init__(self, size: Size, blocks: range) -> None:
        super().__init__()
        self.tables = (
            nn.ModuleList([nn.Embedding(size.vocab, size.hidden), nn.Embedding(size.sequence, size.hidden)])
            if blocks.start == 0
            else None
        )
        self.blocks = nn.ModuleList(Block(size.hidden, size.heads) for _ in blocks)
        last = blocks.stop == size.layers
        head = nn.Linear(size.hidden, size.vocab, bias=False)
        self.end = nn.Sequential(nn.LayerNorm(size.hidden), head) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tables is not None:
            tokens, places = self.tables
            x = tokens(x) + places(torch.arange(x.shape[1], device=x.device)[None])
        for block in self.blocks:
            x = block(x)
        return x if self.end is None else self.end(x)


def passes(name: str, size: Stacked, rank: int, ranks: int, x: Tensor, targets: Tensor) -> Callable[[], None]:
    """One forward and backward of all micro-batches, which x and targets are; gradients are thrown away."""
    parts, run = _built(name, lambda blocks: Part(size, blocks).to(x.dtype), size.blocks, rank, ranks, x, targets)

    def step() -> None:
        run()
        for part in parts:
            part.zero_grad(set_to_none=True)

    return step


def whole_steps(
    name: str, size: Size, dtype: torch.dtype, rank: int, ranks: int, tokens: Tensor, targets: Tensor
) -> Callable[[], None]:
    """A step of GPT with AdamW, a micro-batch for each sequence; blocks are dealt out evenly, as a plain recipe would."""
    parts, run = _built(name, lambda blocks: GPTPart(size, blocks).to(dtype), size.layers, rank, ranks, tokens, targets)
    optimizers = [adamw(part) for part in parts]

    def step() -> None:
        run()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _built(
    name: str,
    make: Callable[[range], nn.Module],
    blocks: int,
    rank: int,
    ranks: int,
    x: Tensor,
    targets: Tensor,
) -> tuple[list[nn.Module], Callable[[], None]]:
    """This rank's parts, and what runs all micro-batches through them."""
    recipe = RECIPES[name]
    count = recipe.stages_per_rank * ranks
    per = blocks // count
    mine = recipe.stages(rank, ranks)
    with x.device:
        parts = [make(range(stage * per, (stage + 1) * per)) for stage in mine]
    for block in (
        [each for part in parts for each in part.get_submodule("blocks").children()] if recipe.compiled else ()
    ):
        block.compile()
    stages = [pipelining.PipelineStage(part, stage, count, x.device) for part, stage in zip(parts, mine, strict=True)]
    several = issubclass(recipe.schedule, schedules.PipelineScheduleMulti)
    schedule = recipe.schedule(stages if several else stages[0], n_microbatches=len(x), loss_fn=mean_loss)
    inputs = (x,) if 0 in mine else ()
    losses: list[Tensor] = []
    ends = {"target": targets, "losses": losses} if count - 1 in mine else {}

    def run() -> None:
        schedule.step(*inputs, **ends, return_outputs=False)

    return parts, run
