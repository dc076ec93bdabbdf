"""The published ways to shard a GPT block, as settings of the cube, and what each of them moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import torch

from cubeloom.base.grid import Grid, grids
from cubeloom.models.configs import GPTConfig
from cubeloom.models.cuts import gpt_cut
from cubeloom.models.gpt import Block
from cubeloom.parallel import Batch, Cut, ParallelConfig, ShardingPolicy
from cubeloom.parallel.resolution import problems, specs_of
from cubeloom.parallel.specs import LinearSpec
from cubeloom.parallel.volume import layer_volume
from cubeloom.tools.baselines.summa import summa_words


@dataclass(frozen=True)
class Shape:
    """A GPT block and its input: M = samples · sequence tokens of `hidden` features."""

    samples: int
    sequence: int
    hidden: int
    heads: int

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence

    @property
    def batch(self) -> Batch:
        return Batch(self.samples, self.sequence)

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(vocab=1, positions=self.sequence, hidden=self.hidden, layers=1, heads=self.heads)

    @property
    def matmuls(self) -> dict[str, tuple[int, int, int]]:
        """(M, K, N) of the block's four linears."""
        m, h = self.tokens, self.hidden
        return {
            "attention.qkv": (m, h, 3 * h),
            "attention.proj": (m, h, h),
            "mlp.up": (m, h, 4 * h),
            "mlp.down": (m, 4 * h, h),
        }

    def cut(self) -> Cut:
        """The block's part of the model's cut."""
        prefix = "blocks.*."
        return {name.removeprefix(prefix): kind for name, kind in gpt_cut(self.config).items() if prefix in name}


@cache
def skeleton(shape: Shape) -> Block:
    """The block without values, which must not be changed. `Block(shape.config)` creates a new one each time."""
    with torch.device("meta"):
        return Block(shape.config)


@dataclass(frozen=True)
class Moved:
    """What a rank receives in one forward and backward of the block, in bytes, or in elements with one byte per
    element.
    """

    activations: Fraction = Fraction(0)  # of linears
    weights: Fraction = Fraction(0)  # of linears
    others: Fraction = Fraction(0)  # norm statistics, and gradients of norms and biases

    @property
    def linears(self) -> Fraction:
        return self.activations + self.weights

    @property
    def total(self) -> Fraction:
        return self.linears + self.others

    def __add__(self, more: Moved) -> Moved:
        return Moved(self.activations + more.activations, self.weights + more.weights, self.others + more.others)


@dataclass(frozen=True)
class Scheme:
    name: str
    grid: Grid
    rest: ShardingPolicy

    def moved(self, shape: Shape, item: int) -> Moved:
        """The library's closed form, summed over the block's layers. `item`: bytes per element, also of gradients."""
        total = Moved()
        config = ParallelConfig.exact(self.grid, replace(self.rest, gradients="model"), shape.batch, item)
        for spec in specs_of(skeleton(shape), shape.cut()):
            everything = sum(layer_volume(spec, config).values(), Fraction(0))
            if isinstance(spec, LinearSpec):
                matmul = layer_volume(replace(spec, bias=False), config)
                activations = matmul.get("x", Fraction(0)) + matmul.get("y", Fraction(0))
                weights = sum(matmul.values(), Fraction(0)) - activations
                total += Moved(activations, weights, everything - activations - weights)
            else:
                total += Moved(others=everything)
        return total

    def refusals(self, shape: Shape) -> list[str]:
        """Why the block of this shape cannot be cut this way; empty if it can. The closed form does not check."""
        return list(problems(specs_of(skeleton(shape), shape.cut()), self.grid, self.rest, shape.batch))


def cheapest(name: str, shape: Shape, rest: ShardingPolicy, candidates: Iterable[Grid]) -> Scheme:
    """The grid on which the linears move least; of equals the one that moves least otherwise."""

    def cost(scheme: Scheme) -> tuple[Fraction, Fraction]:
        moved = scheme.moved(shape, item=2)
        return moved.linears, moved.others

    return min((Scheme(name, grid, rest) for grid in candidates), key=cost)


def cube_side(ranks: int) -> int | None:
    """q, if there are q³ ranks."""
    q = round(ranks ** (1 / 3))
    return q if q**3 == ranks else None


REPLICATED = ShardingPolicy(activations="replicated", weights="freed")
SEQUENCE = ShardingPolicy(activations="sharded", inputs="regathered")
KEPT = ShardingPolicy(activations="sharded", weights="kept")
FREED = ShardingPolicy(activations="sharded", weights="freed")


def schemes(shape: Shape, ranks: int) -> list[Scheme]:
    """The schemes compared on this many ranks. Tensor3D and AxoNN choose their grid by their own communication model."""
    found = [
        Scheme("1-D Megatron", Grid(y=ranks), REPLICATED),
        Scheme("1-D, sequence parallel", Grid(y=ranks), SEQUENCE),
        cheapest("2-D Tensor3D", shape, REPLICATED, grids(ranks, ("y", "x"))),
        cheapest("4-D AxoNN, its best grid", shape, REPLICATED, grids(ranks, ("z", "y", "x"))),
        Scheme("FSDP", Grid(z=ranks), FREED),
    ]
    q = cube_side(ranks)
    if q is not None:
        cube = Grid(z=q, y=q, x=q)
        found += [
            Scheme("4-D AxoNN, on the cube", cube, REPLICATED),
            Scheme("3-D cube, weights kept", cube, KEPT),
            Scheme("3-D cube, weights freed", cube, FREED),
        ]
    return [*found, cheapest("best grid, weights kept", shape, KEPT, grids(ranks, ("z", "y", "x")))]


def summa_moved(shape: Shape, q: int, item: int) -> Moved:
    """SUMMA's closed form for the block's four linears."""
    total = Moved()
    for m, k, n in shape.matmuls.values():
        activations, weights = (sum(summa_words(*sizes, q), Fraction(0)) * item for sizes in ((m, k, 0), (0, k, n)))
        total += Moved(activations, weights)
    return total
