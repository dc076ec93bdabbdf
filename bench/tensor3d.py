"""Bytes that a rank receives in one step of a GPT or a U-Net on a plane of x · y ranks: the best plane beside Megatron's.

    python bench/tensor3d.py [--quick]

Closed forms, which `cubeloom verify` holds to the byte on real processes. A plane of x = 1 is what Megatron-LM does: linears
and convolutions cut by columns and by rows in turn. Tensor3D cuts both ways at once (Singh et al., section on the
communication model); which x and y are best follows from the layers. Activations rest replicated, as there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import torch
from rich.console import Console
from rich.table import Table

from cubeloom.base.divisors import divisors
from cubeloom.base.grid import Grid
from cubeloom.models import build, config, cut_of
from cubeloom.parallel import Batch, ParallelConfig, ShardingPolicy
from cubeloom.parallel.resolution import specs_of
from cubeloom.parallel.specs import EdgeSpec, LayerSpec, LinearSpec
from cubeloom.parallel.volume import pass_volume

PLANES = (4, 8, 16, 32, 64, 128, 256)
MODELS = ["gpt-80b", "unet-7.5b", "unet-28b"]
SAMPLES = 256
REST = ShardingPolicy(activations="replicated", gradients="model")  # as the paper's, in bfloat16


@dataclass(frozen=True)
class Moved:
    grid: Grid
    received: Fraction  # bytes


@cache
def our_layers(model: str) -> tuple[LayerSpec, ...]:
    """The linears and convolutions of all blocks, as we cut them; norms and the edges of the network are left out.

    Sizes and sides do not depend on the grid.
    """
    with torch.device("meta"):
        built = build(model)
    return tuple(spec for spec in specs_of(built, cut_of(built)) if _inside(spec) and spec.name != "head")


def _inside(spec: LayerSpec) -> bool:
    return isinstance(spec, LinearSpec) or (isinstance(spec, EdgeSpec) and spec.kind == "rowwise_scatter")


@cache
def their_layers(model: str) -> tuple[LayerSpec, ...]:
    """A U-Net's res blocks as Tensor3D cuts them: the first convolution and the skip's normal, the second transposed."""
    return tuple(spec for each in our_layers(model) if (spec := _as_theirs(each)) is not None)


def _as_theirs(spec: LayerSpec) -> LayerSpec | None:
    match spec, spec.name.rpartition(".res.")[2]:
        case LinearSpec(), "conv1":
            return replace(spec, side="x")
        case LinearSpec(), "conv2":
            return replace(spec, side="y")
        case EdgeSpec(), "skip":
            return LinearSpec(name=spec.name, k=spec.k, n=spec.n, side="x", bias=spec.bias, pixels=spec.pixels)
    return None


def moved(layers: tuple[LayerSpec, ...], sequence: int, grid: Grid) -> Moved:
    config = ParallelConfig.exact(grid, REST, Batch(SAMPLES, sequence), item=2)
    return Moved(grid, sum((size for each in layers for _, size in pass_volume(each, config)), Fraction(0)))


def planes(ranks: int) -> Iterator[Grid]:
    return (Grid(x=x, y=ranks // x) for x in divisors(ranks))


@dataclass(frozen=True)
class Row:
    """The best plane of so many ranks, beside Megatron's."""

    ranks: int
    best: Moved
    megatron: Moved

    @classmethod
    def of(cls, model: str, layers: tuple[LayerSpec, ...], ranks: int) -> Row:
        sequence = getattr(config(model), "positions", 1)
        found = [moved(layers, sequence, grid) for grid in planes(ranks)]
        return cls(ranks, min(found, key=lambda each: each.received), found[0])

    @property
    def saved(self) -> float:
        """The share of Megatron's bytes that the best plane does not move."""
        return float(1 - self.best.received / self.megatron.received)


def table(title: str, rows: list[Row]) -> Table:
    shown = Table(title=f"{title}, {SAMPLES} samples: GB received a rank and step, bfloat16")
    for heading in ("ranks", "best x · y", "GB", "Megatron, x = 1", "saved"):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(
            str(row.ranks),
            f"{row.best.grid.x} · {row.best.grid.y}",
            f"{float(row.best.received) / 1e9:.2f}",
            f"{float(row.megatron.received) / 1e9:.2f}",
            f"{row.saved:.1%}",
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 64 ranks only")
    quick = parser.parse_args().quick
    console = Console(width=None if sys.stdout.isatty() else 120)
    sizes = PLANES[:5] if quick else PLANES
    for model in MODELS:
        console.print(table(f"{model}, all blocks", [Row.of(model, our_layers(model), ranks) for ranks in sizes]))
        theirs = their_layers(model)
        if theirs:
            console.print(table(f"{model}, res blocks as Tensor3D", [Row.of(model, theirs, ranks) for ranks in sizes]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
