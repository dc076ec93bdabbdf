"""SUMMA, the 2-D matmul of Optimus (Xu, Li, Gong, You 2021, arXiv 2104.05343), as a baseline to count and compare.

On a plane of q × q ranks, the rank in row r (its index on y) and column c (its index on x) holds X[M/q, K/q], W[K/q,
N/q] and Y[M/q, N/q]: block (r, c) of each. Nothing is replicated, input and output have the same layout, and the
forward needs no sum over ranks. Instead whole blocks, the panels, are sent along rows and columns:

    Y[r,c]  = Σt X[r,t] W[t,c]      X broadcast along rows, W along columns
    dX[r,t] = Σc dY[r,c] W[t,c]ᵀ    W broadcast along columns, dX reduced along rows
    dW[t,c] = Σr X[r,t]ᵀ dY[r,c]    X broadcast along rows, dW reduced along columns

This is only a baseline: a weight is a plain local tensor, not a DTensor, and there is no bias. It is not one of the
cube's settings, because its blocks are cut along K where the cube cuts rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base.divisors import divisors
from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.comm import Axis, Network, Pending


def side(grid: Grid) -> int:
    """q of a plane of q × q ranks; any other grid is refused."""
    if grid.x == grid.y and grid.world == grid.x * grid.y:
        return grid.x
    below = isqrt(grid.world)
    sides = [below] if below**2 == grid.world else [below, below + 1]
    legal = " or ".join(f"x={q},y={q} ({q * q} rank{'s' * (q > 1)})" for q in sides)
    raise UserError(
        f"grid {grid} of {grid.world} ranks: SUMMA needs a square plane, x equal to y and no other axis; nearest: {legal}"
    )


def nearest_planes(ranks: int, *sizes: int) -> list[int]:
    """Sides of square planes with `ranks` ranks that divide the sizes; if there is none, the nearest smaller and
    larger.
    """
    legal = [q for q in range(1, min(sizes) + 1) if not any(size % q for size in sizes)]
    below = max(q for q in legal if q * q <= ranks)
    above = min((q for q in legal if q * q >= ranks), default=below)
    return sorted({below, above})


def summa_words(m: int, k: int, n: int, q: int) -> tuple[Fraction, Fraction]:
    """Elements that a rank receives in the forward and in the backward of `[m,k]·[k,n]` on a plane of side q."""
    forward = Fraction((q - 1) * (m * k + k * n), q * q)
    return forward, 2 * forward


@dataclass(frozen=True)
class Plane:
    """The plane from one rank: the ranks of its row are along x, those of its column along y."""

    row: Axis
    column: Axis

    @classmethod
    def of(cls, network: Network) -> Plane:
        side(network.grid)
        return cls(network.axis("x"), network.axis("y"))

    def block(self, whole: Tensor, name: str = "matrix") -> Tensor:
        """This rank's block of a whole matrix; a matrix that cannot be divided evenly is refused."""
        q = self.row.size
        for size in whole.shape:
            if size % q:
                nearest = min(divisors(size), key=lambda parts: abs(parts - q))
                raise UserError(
                    f"{name} {list(whole.shape)} cannot be cut over a plane of {q}×{q}: {q} does not divide {size}; "
                    f"the nearest that does is {nearest}"
                )
        return whole.chunk(q, 0)[self.column.index].chunk(q, 1)[self.row.index].contiguous()


class SummaLinear(nn.Module):
    """Y = X W. `weight` is this rank's block [K/q, N/q]; `name` is for the ledger."""

    def __init__(self, plane: Plane, weight: Tensor, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._plane = plane
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        """[M/q, K/q] -> [M/q, N/q]."""
        return _Summa.apply(x, self.weight, self._plane, self._name)


def _panels(axis: Axis, block: Tensor, origin: str) -> Iterator[Tensor]:
    """Each rank's block in turn, broadcast along the axis. The next broadcast overlaps the computation with this block."""

    def start(root: int) -> Pending:
        return axis.broadcast(block if root == axis.index else torch.empty_like(block), root, origin)

    coming = start(0)
    for root in range(axis.size):
        panel = coming.wait()
        if root + 1 < axis.size:
            coming = start(root + 1)
        yield panel


def _sums(axis: Axis, partials: Iterator[Tensor], origin: str) -> Tensor:
    """The t-th partial of all ranks of the axis is summed on rank t: this rank's sum. A sum overlaps the next matmul."""
    own: Tensor | None = None
    leaving: list[Pending] = []
    for root, partial in enumerate(partials):
        leaving.append(axis.reduce(partial, root, origin))
        if root == axis.index:
            own = partial
        if len(leaving) > 1:
            leaving.pop(0).wait()
    leaving.pop().wait()
    assert own is not None
    return own


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plane: Plane, name: str) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.plane, ctx.name = plane, name
        y = x.new_zeros(x.shape[0], weight.shape[1])
        xs = _panels(plane.row, x, f"{name} input forward")
        ws = _panels(plane.column, weight, f"{name} weight forward")
        # Both next panels are sent while these two are multiplied.
        for x_panel, w_panel in zip(xs, ws, strict=True):
            y.addmm_(x_panel, w_panel)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        plane: Plane = ctx.plane
        dx = dw = None
        if ctx.needs_input_grad[0]:
            ws = _panels(plane.column, weight, f"{ctx.name} weight backward")
            dx = _sums(plane.row, (gradient @ panel.t() for panel in ws), f"{ctx.name} input gradient")
        if ctx.needs_input_grad[1]:
            xs = _panels(plane.row, x, f"{ctx.name} input backward")
            dw = _sums(plane.column, (panel.t() @ gradient for panel in xs), f"{ctx.name} weight gradient")
        return dx, dw, None, None
