"""Bytes that a rank receives in one GPT block, forward and backward: the cube beside what others do.

    python bench/cube.py [--quick]

First as counted by the ledger on real processes, at 8 ranks and a small size (SUMMA needs a square: at 4, 9 and 16); each
figure must be the closed form's, byte for byte, on every rank, or the exit code is 1. Then the closed forms at 8, 64 and
512 ranks for sizes that people train. Then each of the block's matmuls against the lower bound of Al Daas et al. (2022).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

import torch
from rich.console import Console
from rich.table import Table

from cubeloom.comm.ledger import plain
from cubeloom.launch import RankPool
from cubeloom.parallel import ParallelConfig, step_volume
from cubeloom.parallel.resolution import specs_of
from cubeloom.tools.baselines import (
    Scheme,
    Shape,
    best_grid,
    lower_bound,
    moved_words,
    nearest_planes,
    regime,
    schemes,
    summa_words,
)
from cubeloom.tools.baselines.block import Passes, count_block, count_summa, moved_of
from cubeloom.tools.baselines.schemes import Moved, cube_side, skeleton, summa_moved

SMALL = Shape(samples=24, sequence=16, hidden=96, heads=24)
RANKS = 8
DTYPE = torch.float32
# Tokens and hidden sizes of reference/cube.md 1.9, in sequences of 1024 and heads of 64.
SHAPES = [
    Shape(tokens // 1024, 1024, hidden, hidden // 64)
    for tokens, hidden in ((12288, 3072), (32768, 8192), (4096, 12288))
]
WORLDS = (8, 64, 512)


@dataclass(frozen=True)
class Counted:
    """A scheme as it ran, beside what was predicted for it."""

    name: str
    where: str
    ranks: int
    passes: Passes  # of rank 0
    predicted: Moved
    agree: bool  # on every rank, by part and by axis
    sharded: bool  # all operands rest as one copy, as the lower bound supposes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, and no count at 9 and 16 ranks")
    quick = parser.parse_args().quick
    console = Console(width=None if sys.stdout.isatty() else 150)
    counted = count(planes=(2,) if quick else (2, 3, 4))
    console.print(counted_table(counted), forward_table(counted), sep="\n")
    for shape in SHAPES[:1] if quick else SHAPES:
        console.print(closed_form_table(shape))
    for shape in SHAPES[:1] if quick else SHAPES:
        console.print(bound_table(shape))
    wrong = [each.name for each in counted if not each.agree]
    if wrong:
        console.print(f"COUNTED AND CLOSED FORM DIFFER: {', '.join(wrong)}")
        return 1
    console.print("counted bytes are the closed form's exactly, on every rank, by axis and by part")
    return 0


def count(planes: tuple[int, ...]) -> list[Counted]:
    found: list[Counted] = []
    with RankPool(max(RANKS, *(q * q for q in planes))) as pool:
        for scheme in schemes(SMALL, RANKS):
            runs: list[Passes] = pool.run(RANKS, count_block, scheme, SMALL, DTYPE)
            found.append(judge_scheme(scheme, runs))
        for q in planes:
            runs = pool.run(q * q, count_summa, q, SMALL, DTYPE)
            predicted = summa_moved(SMALL, q, DTYPE.itemsize)
            agree = all(run.moved() == predicted for run in runs)
            found.append(Counted("2-D SUMMA (linears)", f"x={q},y={q}", q * q, runs[0], predicted, agree, True))
    return found


def judge_scheme(scheme: Scheme, runs: list[Passes]) -> Counted:
    specs = specs_of(skeleton(SMALL), SMALL.cut())
    by_axis = step_volume(specs, ParallelConfig.exact(scheme.grid, scheme.rest, SMALL.batch, DTYPE.itemsize))
    predicted = scheme.moved(SMALL, DTYPE.itemsize)
    agree = all(run.moved() == predicted and run.by_axis() == by_axis for run in runs)
    sharded = scheme.rest.activations == "sharded"
    return Counted(scheme.name, str(scheme.grid), scheme.grid.world, runs[0], predicted, agree, sharded)


def counted_table(counted: list[Counted]) -> Table:
    table = Table(
        *("scheme", "ranks", "grid", "forward", "backward", "activations", "weights", "norms, biases"),
        *("counted", "closed form", "equal"),
        title=f"Counted: bytes that a rank receives, M={SMALL.tokens} h={SMALL.hidden} {DTYPE}, real processes",
        caption=f"SUMMA needs a square number of ranks, which {RANKS} is not; its block is the four linears and attention.",
    )
    for each in counted:
        moved = each.passes.moved()
        passes = (moved_of(ledger).total for ledger in (each.passes.forward, each.passes.backward))
        parts = (*passes, moved.activations, moved.weights, moved.others, moved.total, each.predicted.total)
        table.add_row(each.name, str(each.ranks), each.where, *map(whole, parts), "yes" if each.agree else "NO")
    right_aligned(table, first=3, last=9)
    return table


def forward_table(counted: list[Counted]) -> Table:
    """The bound is for one matmul from one copy of its operands, so only a forward of sharded operands can be held to it."""
    table = Table(
        *("scheme", "ranks", *SMALL.matmuls),
        title="Counted: bytes received in the forward of each matmul, as a multiple of its lower bound",
        caption="R: operands rest replicated, which the bound does not cover; they are paid for in another pass.",
    )
    for each in counted:
        cells = []
        for layer, sizes in SMALL.matmuls.items():
            received = each.passes.forward_of(layer)
            bound = lower_bound(*sizes, each.ranks) * DTYPE.itemsize
            cells.append(
                f"{whole(received)}  {float(received) / bound:.2f}×" if each.sharded else f"{whole(received)}  R"
            )
        table.add_row(each.name, str(each.ranks), *cells)
    right_aligned(table, first=2, last=5)
    return table


def closed_form_table(shape: Shape) -> Table:
    """Million words of the linears, and MB in bf16 with norms and biases."""
    table = Table(
        "scheme",
        *(title for ranks in WORLDS for title in (f"{ranks} ranks", "M words", "MB")),
        title=f"Closed form: received per rank, forward and backward, M={shape.tokens} h={shape.hidden}",
        caption="M words: the linears. MB: all, in bf16. *: the formula alone, since "
        f"{shape.samples} sequences of {shape.sequence} tokens and {shape.heads} heads cannot be cut so.",
    )
    for row in zip(*(schemes(shape, ranks) for ranks in WORLDS), strict=True):
        table.add_row(row[0].name, *(cell for scheme in row for cell in scheme_cells(scheme, shape)))
    planes = [nearest_planes(ranks, shape.tokens, shape.hidden) for ranks in WORLDS]
    for index in range(max(map(len, planes))):
        sides = [plane[index] if index < len(plane) else None for plane in planes]
        table.add_row("" if index else "2-D SUMMA (linears)", *(cell for q in sides for cell in summa_cells(shape, q)))
    right_aligned(table, first=1, last=3 * len(WORLDS))
    return table


def scheme_cells(scheme: Scheme, shape: Shape) -> tuple[str, str, str]:
    words, size = scheme.moved(shape, item=1).linears, scheme.moved(shape, item=2).total
    star = "*" if scheme.refusals(shape) else ""
    return f"{scheme.grid}{star}", millions(words), millions(size)


def summa_cells(shape: Shape, q: int | None) -> tuple[str, str, str]:
    if q is None:
        return "", "", ""
    words = summa_moved(shape, q, item=1).total
    star = "*" if shape.samples % q or shape.heads % q else ""
    return f"{q}×{q} = {q * q}{star}", millions(words), millions(2 * words)


def bound_table(shape: Shape) -> Table:
    """One forward matmul from sharded operands: the cube and the best grid beside the bound."""
    table = Table(
        *("matmul", "M × K × N", "ranks", "regime", "bound, M words", "cube", "best grid (gm,gk,gn)", "SUMMA"),
        title=f"Lower bound of Al Daas et al., one forward matmul, M={shape.tokens} h={shape.hidden}",
        caption="Cube, best grid and SUMMA as multiples of the bound; operands rest sharded.",
    )
    for layer, sizes in shape.matmuls.items():
        for ranks in WORLDS:
            bound = lower_bound(*sizes, ranks)

            def times(words: Fraction, bound: float = bound) -> str:
                return f"{float(words) / bound:.2f}×"

            q, best, root = cube_side(ranks), best_grid(*sizes, ranks), isqrt(ranks)
            m, k, n = sizes
            table.add_row(
                layer if ranks == WORLDS[0] else "",
                f"{m} × {k} × {n}" if ranks == WORLDS[0] else "",
                str(ranks),
                f"{regime(*sizes, ranks)}-D",
                f"{bound / 1e6:.2f}",
                times(moved_words(*sizes, (q, q, q))) if q else "-",
                f"{best} {times(moved_words(*sizes, best))}",
                times(summa_words(*sizes, root)[0]) if root**2 == ranks else "-",
            )
    right_aligned(table, first=2, last=7)
    return table


def right_aligned(table: Table, first: int, last: int) -> None:
    for column in table.columns[first : last + 1]:
        column.justify = "right"


def millions(number: Fraction) -> str:
    return f"{float(number) / 1e6:,.1f}"


def whole(size: Fraction) -> str:
    return f"{plain(size):,}"


if __name__ == "__main__":
    sys.exit(main())
