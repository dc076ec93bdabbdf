"""Runs one GPT block on real ranks and counts every byte. These functions run on each rank of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base import counter
from cubeloom.base.grid import Grid
from cubeloom.base.initial import Normal
from cubeloom.comm import Entry, Ledger, Network
from cubeloom.models.gpt import Block
from cubeloom.models.layers import AttentionByHead
from cubeloom.parallel import Given, apply
from cubeloom.parallel.layout import Layout
from cubeloom.parallel.parameter import Block as Part
from cubeloom.tools.baselines.schemes import Moved, Scheme, Shape
from cubeloom.tools.baselines.summa import Plane, SummaLinear


@dataclass(frozen=True)
class Passes:
    """The communication of one rank in a forward and the following backward."""

    forward: Ledger
    backward: Ledger

    def by_axis(self) -> dict[str, Fraction]:
        return Ledger(self.forward.entries + self.backward.entries).by_axis()

    def moved(self) -> Moved:
        return moved_of(self.forward) + moved_of(self.backward)

    def forward_of(self, layer: str) -> Fraction:
        """Bytes received in the forward for one linear."""
        entries = (entry for entry in self.forward.entries if entry.origin.split()[0] == layer)
        return sum((entry.received for entry in entries), Fraction(0))


def moved_of(ledger: Ledger) -> Moved:
    return sum(map(_kind, ledger.entries), Moved())


def _kind(entry: Entry) -> Moved:
    """An origin starts with the layer's name. Gradients summed in a bucket have no layer."""
    match entry.origin.split():
        case [_, "input" | "output", *_]:
            return Moved(activations=entry.received)
        case [_, "weight", *_]:
            return Moved(weights=entry.received)
    # Biases and norms. A bucket would also contain weights replicated over z, which no scheme here has.
    return Moved(others=entry.received)


def count_block(scheme: Scheme, shape: Shape, dtype: torch.dtype) -> Passes:
    """Forward and backward of the block on the scheme's grid."""
    network = Network(scheme.grid)
    with torch.device("meta"):
        plain = Block(shape.config)

    def fill(name: str, part: Part) -> Tensor:
        return part.draw(Normal(0.02), counter.key(name), dtype, network.device)

    rows = shape.tokens // (scheme.grid.data * scheme.grid.z)
    sharded = scheme.rest.activations == "sharded"
    if sharded:
        rows //= scheme.grid.y
    stream = Layout.of(rows=("data", "z", "y") if sharded else ("data", "z"), features="x")

    def example(_: int) -> dict[str, Any]:
        tokens = torch.empty(shape.tokens, shape.hidden, dtype=dtype, device="meta")
        return {"x": Given(tokens, stream), "sequence": shape.sequence}

    apply(plain, shape.cut(), network, shape.batch, fill, scheme.rest, example=example)
    return _count(network, plain, shape, torch.ones(rows, shape.hidden // scheme.grid.x, dtype=dtype))


def count_summa(q: int, shape: Shape, dtype: torch.dtype) -> Passes:
    """The same on a plane of q × q ranks."""
    network = Network(Grid(x=q, y=q))
    plane = Plane.of(network)
    block = SummaBlock(plane, shape, dtype)
    return _count(network, block, shape, torch.ones(shape.tokens // q, shape.hidden // q, dtype=dtype))


def _count(network: Network, block: nn.Module, shape: Shape, x: Tensor) -> Passes:
    x.requires_grad_()
    with network.recording() as forward:
        y = block(x, shape.sequence)
    with network.recording() as backward:
        y.backward(torch.ones_like(y))
    return Passes(forward, backward)


class SummaBlock(nn.Module):
    """The block's linears, attention and residual stream on a SUMMA plane, without norms and biases."""

    def __init__(self, plane: Plane, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.core = AttentionByHead(head_dim=shape.hidden // shape.heads)
        self.qkv, self.proj, self.up, self.down = (
            SummaLinear(plane, plane.block(_drawn(name, k, n, dtype), name), name)
            for name, (_, k, n) in shape.matmuls.items()
        )

    def forward(self, x: Tensor, sequence: int) -> Tensor:
        """[M/q, H/q] -> [M/q, H/q]: rows are whole sequences, features whole heads."""
        x = x + self.proj(self.core(self.qkv(x), sequence))
        return x + self.down(functional.gelu(self.up(x), approximate="tanh"))


def _drawn(name: str, k: int, n: int, dtype: torch.dtype) -> Tensor:
    """A whole weight, which a baseline of this size can afford."""
    return Part((k, n), (0, 0), (k, n)).draw(Normal(0.02), counter.key(name), dtype, torch.device("cpu"))
