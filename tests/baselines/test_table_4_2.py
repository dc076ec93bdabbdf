"""The table of `reference/cube.md` 4.2: each method is one linear on a grid; its shards at rest and its words, counted.

The expected words are written here from the table and from sizes alone, not taken from the library's closed form.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.parallel import Batch, ShardingPolicy, apply
from cubeloom.parallel.layers import Contract, Expand

SAMPLES, SEQUENCE = 8, 3
M, K, N = SAMPLES * SEQUENCE, 16, 40  # x, w and y differ, so that no sum of them is another by accident

Terms = tuple[int, int, int]  # how many times x, w and y


@dataclass(frozen=True)
class Row:
    method: str
    grid: Grid
    forward: Terms
    backward: Terms
    rest: ShardingPolicy
    kind: Expand | Contract = Expand()  # noqa: RUF009
    x: tuple[int, int] = (1, 1)  # what X [M, K] is divided by at rest
    w: tuple[int, int] = (1, 1)  # W [N, K], as torch stores it
    y: tuple[int, int] = (1, 1)  # Y [M, N]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(gm, gk, gn); rows are cut over data too, which for a linear is one more m axis."""
        gk, gn = (self.grid.x, self.grid.y) if isinstance(self.kind, Expand) else (self.grid.y, self.grid.x)
        return self.grid.z * self.grid.data, gk, gn

    def words(self, terms: Terms) -> Fraction:
        gm, gk, gn = self.sizes
        x = Fraction(gn - 1, gn) * Fraction(M * K, gm * gk)
        w = Fraction(gm - 1, gm) * Fraction(K * N, gk * gn)
        y = Fraction(gk - 1, gk) * Fraction(M * N, gm * gn)
        return sum((count * size for count, size in zip(terms, (x, w, y), strict=True)), Fraction(0))


def replicated(weights: str = "freed") -> ShardingPolicy:
    return ShardingPolicy(activations="replicated", weights=weights)  # type: ignore[arg-type]


def sharded(weights: str = "freed", inputs: str = "kept") -> ShardingPolicy:
    return ShardingPolicy(activations="sharded", weights=weights, inputs=inputs)  # type: ignore[arg-type]


CUBE, ROW, COLUMN = Grid(z=2, y=2, x=2), Contract(), Expand()
# A Contract has its k on y, so that one axis serves a column layer and the row layer after it.
TABLE = [
    Row("data parallel", Grid(z=4), (0, 0, 0), (0, 2, 0), replicated("replicated"), x=(4, 1), y=(4, 1)),
    Row("data parallel, data axis", Grid(data=4), (0, 0, 0), (0, 2, 0), replicated(), x=(4, 1), y=(4, 1)),
    Row("ZeRO-3, FSDP", Grid(z=4), (0, 1, 0), (0, 2, 0), sharded(), x=(4, 1), w=(4, 1), y=(4, 1)),
    Row("ZeRO-3, weights kept", Grid(z=4), (0, 1, 0), (0, 1, 0), sharded("kept"), x=(4, 1), w=(4, 1), y=(4, 1)),
    Row("Megatron column", Grid(y=4), (0, 0, 0), (2, 0, 0), replicated(), COLUMN, w=(4, 1), y=(1, 4)),
    Row("Megatron row", Grid(y=4), (0, 0, 2), (0, 0, 0), replicated(), ROW, x=(1, 4), w=(1, 4)),
    Row(
        "column with sequence parallelism",
        Grid(y=4),
        (1, 0, 0),
        (2, 0, 0),
        sharded(inputs="regathered"),
        COLUMN,
        x=(4, 1),
        w=(4, 1),
        y=(1, 4),
    ),
    Row(
        "row with sequence parallelism",
        Grid(y=4),
        (0, 0, 1),
        (0, 0, 1),
        sharded(inputs="regathered"),
        ROW,
        x=(1, 4),
        w=(1, 4),
        y=(4, 1),
    ),
    # Megatron's GTP is the same but for the dimension in which it cuts a weight.
    Row("FSDP + TP, column", Grid(z=2, y=4), (0, 1, 0), (2, 2, 0), replicated(), COLUMN, (2, 1), (8, 1), (2, 4)),
    Row("FSDP + TP, row", Grid(z=2, y=4), (0, 1, 2), (0, 2, 0), replicated(), ROW, (2, 4), (2, 4), (2, 1)),
    Row("Tensor3D 2-D", CUBE, (0, 0, 2), (2, 2, 0), replicated("replicated"), COLUMN, (2, 2), (2, 2), (2, 2)),
    Row("Tensor3D 2-D, row", CUBE, (0, 0, 2), (2, 2, 0), replicated("replicated"), ROW, (2, 2), (2, 2), (2, 2)),
    Row(
        "Tensor3D 2-D, data axis",
        Grid(data=2, y=2, x=2),
        (0, 0, 2),
        (2, 2, 0),
        replicated(),
        x=(2, 2),
        w=(2, 2),
        y=(2, 2),
    ),
    Row("Tensor3D 2-D, 2×4", Grid(y=4, x=2), (0, 0, 2), (2, 0, 0), replicated(), x=(1, 2), w=(4, 2), y=(1, 4)),
    Row("AxoNN 4-D", CUBE, (0, 1, 2), (2, 2, 0), replicated(), COLUMN, (2, 2), (4, 2), (2, 2)),
    Row("AxoNN 4-D, row", CUBE, (0, 1, 2), (2, 2, 0), replicated(), ROW, (2, 2), (4, 2), (2, 2)),
    # The table has 2x + 2w + 2y in the backward for code that gathers dY twice; we keep it, as its note says one could.
    Row("Bian, paper", CUBE, (1, 1, 1), (2, 2, 1), sharded("freed", "regathered"), COLUMN, (4, 2), (4, 2), (4, 2)),
    Row("Bian, paper, row", CUBE, (1, 1, 1), (2, 2, 1), sharded("freed", "regathered"), ROW, (4, 2), (4, 2), (4, 2)),
    Row("Bian, HEAD", CUBE, (1, 1, 1), (1, 1, 1), sharded("kept"), COLUMN, (4, 2), (4, 2), (4, 2)),
    Row("Bian, HEAD, row", CUBE, (1, 1, 1), (1, 1, 1), sharded("kept"), ROW, (4, 2), (4, 2), (4, 2)),
    Row("Colossal, December 2021", CUBE, (1, 0, 1), (1, 2, 1), sharded("replicated"), COLUMN, (4, 2), (2, 2), (4, 2)),
]


class OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(K, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@dataclass(frozen=True)
class Seen:
    w: tuple[int, ...]
    y: tuple[int, ...]
    forward: Fraction
    backward: Fraction


def one_step(row: Row) -> Seen:
    network = Network(row.grid)
    with torch.device("meta"):
        model = OneLinear()
    batch = Batch(SAMPLES, SEQUENCE)
    apply(
        model,
        {"linear": row.kind},
        network,
        batch,
        lambda _, block: torch.ones(block.local, dtype=torch.float64),
        row.rest,
        unchecked=True,  # a single layer: what it is given here is its part
    )
    x = torch.ones(M // row.x[0], K // row.x[1], dtype=torch.float64, requires_grad=True)
    with network.recording() as forward:
        y = model(x)
    with network.recording() as backward:
        y.backward(torch.ones_like(y))
    (weight,) = model.parameters()
    assert isinstance(weight, DTensor) and x.grad is not None and weight.grad is not None
    # With ones everywhere each result is the length of the sum that made it: nothing is missing and nothing is twice there.
    assert torch.equal(y, torch.full_like(y, K))
    assert torch.equal(x.grad, torch.full_like(x, N))
    # Of gradients the mean over the ranks of data and z is taken, of all the rows that they have.
    rows = M / (row.grid.data * row.grid.z)
    assert isinstance(weight.grad, DTensor) and torch.equal(
        weight.grad.to_local(), torch.full_like(weight.to_local(), rows)
    )
    words = [sum(ledger.by_axis().values(), Fraction(0)) / 8 for ledger in (forward, backward)]
    return Seen(tuple(weight.to_local().shape), tuple(y.shape), *words)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.method)
def test_row(ranks: RankPool, row: Row) -> None:
    expected = Seen(
        w=(N // row.w[0], K // row.w[1]),
        y=(M // row.y[0], N // row.y[1]),
        forward=row.words(row.forward),
        backward=row.words(row.backward),
    )
    assert ranks.run(row.grid.world, one_step, row) == [expected] * row.grid.world


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.method)
def test_no_choice_of_rest_changes_the_sum_of_both_passes(row: Row) -> None:
    """2x + 2w + 2y, and one more w where the gathered copy is freed, one more x where the input is gathered again."""
    both = tuple(f + b for f, b in zip(row.forward, row.backward, strict=True))
    freed = row.rest.weights == "freed" and row.grid.z > 1
    again = row.rest.inputs == "regathered" and row.rest.activations == "sharded"
    assert row.words(both) == row.words((2 + again, 2 + freed, 2))  # type: ignore[arg-type]
