"""A kind of layer of your own, in one file: a learned factor for each feature of the residual stream (LayerScale).

python examples/own_layer.py

The spec states how input, output and parameters lie. From it follow the axes over which the gradient is summed, the bytes that
`step_volume` and a plan predict, and what a checkpoint holds. The layer computes with what its rank has.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom import Grid
from cubeloom.base.initial import Constant, Initial, Normal
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.parallel import (
    Batch,
    Cut,
    ParallelConfig,
    ShardingPolicy,
    apply,
    initial_values,
    materialise,
    resolve,
    step_volume,
)
from cubeloom.parallel.layers import Contract, Declared, Embedding, Expand, Loss, Making, Norm, Seen, make_layer
from cubeloom.parallel.layout import Layout
from cubeloom.parallel.specs import LayerSpec, Parameter, Rule, Touched, divides, stream, vectors
from cubeloom.parallel.state import CubeState


class LayerScale(nn.Module):  # the plain layer, which knows nothing of devices
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@dataclass(frozen=True, kw_only=True)
class ScaleSpec(LayerSpec):  # how it lies on any grid: sizes and layouts, no torch
    features: int

    def takes(self, c: ParallelConfig) -> tuple[Layout, ...]:
        return (self.gives(c),)

    def gives(self, c: ParallelConfig) -> Layout:
        return stream("x", bool(c.sharded))  # [rows/data·z·y, features/x]

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        yield from vectors(self.name, ["weight"], self.features, "x", c.sharded)  # [features/x]

    def touched(self, c: ParallelConfig) -> Touched:
        return Touched(forward=2 * self.saved(c), input_grad=4 * self.saved(c))

    def saved(self, c: ParallelConfig) -> Any:
        return c.rows() / c.row_parts("y") * self.features / c.x * c.item  # its input

    def rules(self, c: ParallelConfig) -> Iterator[Rule]:
        yield from divides("hidden size over x", "features", self.features, c, "x")


@dataclass(frozen=True)
class Scale(Declared):  # what a cut says of it
    def spec(self, name: str, module: nn.Module, seen: Seen) -> ScaleSpec | None:
        return ScaleSpec(name=name, features=len(module.weight)) if isinstance(module, LayerScale) else None


class CubeScale(nn.Module):  # what computes it on a rank
    def __init__(self, weight: nn.Parameter | None, state: CubeState) -> None:
        super().__init__()
        assert weight is not None
        self.weight, self._state = weight, state

    def forward(self, x: Tensor) -> Tensor:
        return x * self._state.local(self.weight)


@make_layer.register
def _(spec: ScaleSpec, making: Making) -> nn.Module:
    return CubeScale(making.parameter("weight"), making.state)


# From here on: a model that uses it, trained serially and on a grid.

VOCAB, WIDTH = 48, 24
GRID, BATCH = Grid(x=2, y=2), Batch(samples=4, sequence=6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = LayerScale(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens.flatten())
        x = x + self.scale(self.down(torch.relu(self.up(self.norm(x)))))
        return self.loss(self.head(x), targets.flatten())

    def initial(self, name: str) -> Initial:
        return Constant(0.5) if name in ("norm.weight", "scale.weight") else Normal(0.2)


CUT: Cut = {
    "embed": Embedding(),
    "norm": Norm(),
    "up": Expand(),
    "down": Contract(),
    "scale": Scale(),
    "head": Expand(sharded_output=True),
    "loss": Loss(),
}


def train(grid: Grid | None) -> tuple[list[float], bool]:
    """The losses of five steps, and whether the first one's bytes were those predicted."""
    with torch.device("meta"):
        model = Model()
    fill, network = initial_values(model, seed=0, dtype=torch.float64), Network(grid or Grid())
    specs = resolve(model, CUT, network.grid, ShardingPolicy(), BATCH)
    if grid is None:
        materialise(model, fill)
    else:
        apply(model, CUT, network, BATCH, fill)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(BATCH.samples * BATCH.sequence).view(BATCH.samples, BATCH.sequence)
    losses, agree = [], True
    for step in range(5):
        optimizer.zero_grad()
        with network.recording() as ledger:
            loss = model(tokens, (tokens + 1) % VOCAB)
            loss.backward()
        if step == 0 and grid is not None:
            config = ParallelConfig.exact(grid, ShardingPolicy(), BATCH, item=8)
            agree = {axis: size for axis, size in ledger.by_axis().items() if size} == step_volume(specs, config)
        optimizer.step()
        losses.append(loss.item())
    return losses, agree


if __name__ == "__main__":
    with RankPool(GRID.world) as pool:
        ((serial, _),) = pool.run(1, train, None)
        cut, agree = pool.run(GRID.world, train, GRID)[0]
    for step, (one, four) in enumerate(zip(serial, cut, strict=True)):
        print(f"step {step}   serial {one:.12f}   on {GRID} {four:.12f}")
        assert abs(one - four) < 1e-10
    print(f"counted bytes are the predicted ones: {agree}")
    assert agree
