"""SUMMA against the serial linear, and its ledger against the closed form."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.tools.baselines import Shape, SummaLinear, nearest_planes, summa_words
from cubeloom.tools.baselines.block import SummaBlock
from cubeloom.tools.baselines.summa import Plane, side

M, K, N = 12, 18, 30


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and dY, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((M, K), (K, N), (M, N))
    x, w, dy = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return x, w, dy


def train(q: int, dtype: torch.dtype) -> tuple[float, list[dict[str, Fraction]], set[str]]:
    """The largest difference of Y, dX and dW from the serial ones; bytes by axis of each pass; operations used."""
    x, w, dy = operands(dtype)
    x.requires_grad_()
    w.requires_grad_()
    y = functional.linear(x, w.t())
    y.backward(dy)
    network = Network(Grid(x=q, y=q))
    plane = Plane.of(network)
    own_x = plane.block(x.detach()).requires_grad_()
    layer = SummaLinear(plane, plane.block(w.detach()), "layer")
    with network.recording() as forward:
        own_y = layer(own_x)
    with network.recording() as backward:
        own_y.backward(plane.block(dy))
    assert x.grad is not None and w.grad is not None and own_x.grad is not None and layer.weight.grad is not None
    pairs = ((own_y, y), (own_x.grad, x.grad), (layer.weight.grad, w.grad))
    worst = max((ours - plane.block(whole)).abs().max().item() for ours, whole in pairs)
    entries = forward.entries + backward.entries
    assert all(entry.origin.startswith("layer ") for entry in entries)
    return worst, [forward.by_axis(), backward.by_axis()], {entry.operation for entry in entries}


@pytest.mark.parametrize("q", [1, 2, 3])
def test_it_is_the_serial_linear_and_its_bytes_are_the_closed_form(ranks: RankPool, q: int) -> None:
    expected = [words * 8 for words in summa_words(M, K, N, q)]
    for worst, passes, operations in ranks.run(q * q, train, q, torch.float64):
        assert worst < 1e-12
        assert [sum(axes.values(), Fraction(0)) for axes in passes] == expected
        assert operations == ({"broadcast", "reduce"} if q > 1 else set())


def test_activations_and_weights_travel_along_their_own_axis(ranks: RankPool) -> None:
    """X along rows (x) and W along columns (y): each once in the forward and twice in the backward."""
    along_x, along_y = Fraction(M * K * 8, 4), Fraction(K * N * 8, 4)
    for _, (forward, backward), _ in ranks.run(4, train, 2, torch.float64):
        assert forward == {"x": along_x, "y": along_y}
        assert backward == {"x": 2 * along_x, "y": 2 * along_y}


def test_it_works_in_bfloat16(ranks: RankPool) -> None:
    for worst, _, _ in ranks.run(4, train, 2, torch.bfloat16):
        assert worst < 0.25  # of numbers about ten


def run_block(q: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the block's output and input gradient."""
    plane = Plane.of(Network(Grid(x=q, y=q)))
    shape = Shape(samples=6, sequence=4, hidden=24, heads=6)
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(shape.tokens, shape.hidden, generator=generator, dtype=torch.float64)
    x = plane.block(whole).requires_grad_()
    y = SummaBlock(plane, shape, torch.float64)(x, shape.sequence)
    y.backward(plane.block(whole))
    assert x.grad is not None
    return y.detach(), x.grad


def test_a_block_on_a_plane_is_the_block_on_one_rank(ranks: RankPool) -> None:
    """Input and output lie alike, so linears follow one another, and a residual stream, without any exchange."""
    (serial,) = ranks.run(1, run_block, 1)
    parts = ranks.run(4, run_block, 2)
    for index, whole in enumerate(serial):
        (a, b), (c, d) = (part[index] for part in parts[:2]), (part[index] for part in parts[2:])
        torch.testing.assert_close(
            torch.cat([torch.cat([a, b], 1), torch.cat([c, d], 1)]), whole, rtol=1e-12, atol=1e-12
        )


def order(q: int) -> list[str]:
    """What one forward asked for, in order."""
    network = Network(Grid(x=q, y=q))
    plane = Plane.of(network)
    x, w, _ = operands(torch.float64)
    layer = SummaLinear(plane, plane.block(w), "layer")
    own = plane.block(x)
    real, seen = torch.Tensor.addmm_, []
    with network.recording() as ledger, pytest.MonkeyPatch.context() as patch:

        def addmm_(self: Tensor, *arguments: Tensor) -> Tensor:
            seen.append(f"matmul after {len(ledger.entries)}")
            return real(self, *arguments)

        patch.setattr(torch.Tensor, "addmm_", addmm_)
        layer(own)
    return seen


def test_the_next_panels_are_under_way_before_a_matmul(ranks: RankPool) -> None:
    """Two broadcasts a panel: the first matmul finds four started, the second six, the last no more."""
    assert ranks.run(9, order, 3)[0] == ["matmul after 4", "matmul after 6", "matmul after 6"]


@pytest.mark.parametrize(
    ("grid", "nearest"),
    [
        (Grid(y=2, x=4), r"x=2,y=2 \(4 ranks\) or x=3,y=3 \(9 ranks\)"),
        (Grid(y=8), r"x=2,y=2 \(4 ranks\) or x=3,y=3 \(9 ranks\)"),
        (Grid(z=4, y=2, x=2), r"nearest: x=4,y=4 \(16 ranks\)$"),
        (Grid(y=4), r"nearest: x=2,y=2 \(4 ranks\)$"),
        (Grid(data=2), r"x=1,y=1 \(1 rank\) or x=2,y=2"),
    ],
)
def test_a_grid_that_is_no_square_plane_is_refused(grid: Grid, nearest: str) -> None:
    with pytest.raises(UserError, match=f"square plane.*{nearest}"):
        side(grid)


def cut_badly() -> None:
    Plane.of(Network(Grid(x=2, y=2))).block(torch.zeros(12, 9), "weight")


def test_sizes_that_do_not_divide_are_refused(ranks: RankPool) -> None:
    with pytest.raises(UserError, match=r"weight \[12, 9\].*2 does not divide 9; the nearest that does is 1"):
        ranks.run(4, cut_badly)


def test_nearest_planes() -> None:
    assert nearest_planes(8, 96, 384) == [2, 3]
    assert nearest_planes(64, 3072) == [8]
    assert nearest_planes(512, 3072, 12288) == [16, 24]
    assert nearest_planes(512, 8192) == [16, 32]
    assert nearest_planes(8, 4) == [2, 4]
    assert nearest_planes(8, 2) == [2]
