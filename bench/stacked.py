"""A stack of our blocks with a light head in our runtime: forward and backward, as torch's schedules are timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.peers.schedules import Stacked
from cubeloom.comm import Network
from cubeloom.models import CrossEntropy, GPTConfig
from cubeloom.models.cuts import gpt_cut
from cubeloom.models.gpt import Block as GPTBlock
from cubeloom.models.pieces import Carry, Data, Piece
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.parallel.parameter import Block
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.recorded import GraphRecord


class Stack(nn.Module):
    """Our blocks with a light head, in pieces; the data is what the first block gets."""

    def __init__(self, size: Stacked) -> None:
        super().__init__()
        self.size = size
        self.config = GPTConfig(
            vocab=size.classes, positions=size.sequence, hidden=size.hidden, layers=size.blocks, heads=size.heads
        )
        self.blocks = nn.ModuleList(GPTBlock(self.config) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.classes, bias=False)
        self.loss = CrossEntropy()

    def pieces(self) -> list[Piece]:
        def block(number: int) -> Piece:
            def forward(carry: Carry, data: Data) -> Carry:
                x = carry["x"] if number else data["x"].flatten(0, 1)
                return {"x": self.blocks[number](x, data["x"].shape[1])}

            return Piece((f"blocks.{number}",), forward)

        end = Piece(("norm", "head", "loss"), self._end, losses={"loss": "targets"})
        return [*(block(number) for number in range(len(self.blocks))), end]

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        carry: Carry = {}
        for piece in self.pieces():
            carry = piece.run(carry, {"x": x, "targets": targets})
        return carry["loss"]

    def _end(self, carry: Carry, data: Data) -> Carry:
        return {"loss": self.loss(self.head(self.norm(carry["x"])), data["targets"].flatten())}

    def example(self, samples: int) -> dict[str, Tensor]:
        shape = samples, self.size.sequence
        return {
            "x": torch.empty(*shape, self.size.hidden, device="meta"),
            "targets": torch.empty(shape, dtype=torch.long, device="meta"),
        }


class ForwardAndBackward(Pipeline):
    """As torch's peers are timed: replicas' gradients are not summed, and nobody asks for the loss."""

    def passes(self, data: dict[str, Tensor]) -> None:
        if not self._boundaries:
            self.learn(data)
        with self.gradients.accumulating():
            if self._recorded is not None:
                self._recorded.begin()
            self._run(self._work(data, 0, None), self._channels)
        for parameter in self.parameters.values():
            parameter.grad = None


def our_passes(
    name: str,
    size: Stacked,
    network: Network,
    data: dict[str, Tensor],
    record: bool = False,
    compiled: bool = False,
) -> Callable[[], None]:
    with torch.device("meta"):
        model = Stack(size)
    schedule = generate(name, network.grid.pipe, len(data["x"]))
    per = size.blocks // schedule.stages
    stages = [range(stage * per, (stage + 1) * per) for stage in range(schedule.stages)]
    stages[-1] = range(stages[-1].start, size.blocks + 1)
    used = {key: kind for key, kind in gpt_cut(model.config).items() if key not in ("embed", "positions", "dropout")}
    numbers = torch.Generator(network.device).manual_seed(0)

    def fill(name: str, block: Block) -> Tensor:
        drawn = 0.02 * torch.randn(block.local, generator=numbers, device=network.device)
        return (drawn + float("norm" in name and name.endswith("weight"))).to(data["x"].dtype)

    batch = Batch(len(data["x"]), size.sequence)
    pipeline = ForwardAndBackward(
        model,
        used,
        network,
        batch,
        fill,
        schedule,
        ShardingPolicy(),
        stages,
        compile=compiled,
        record=GraphRecord() if record else None,
    )
    return lambda: pipeline.passes(data)
