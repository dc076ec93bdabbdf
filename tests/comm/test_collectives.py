"""Each collective against what it means, on real processes, with what the ledger says of it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from cubeloom import Grid, UserError
from cubeloom.base.grid import AXES
from cubeloom.comm import Network
from cubeloom.launch import RankFailed, RankPool
from cubeloom.parallel.parameter import distribute


def gather_along(grid: Grid, axes: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """The ranks as gathered along the axes, and as the grid says."""
    network = Network(grid)
    gathered = network.axis(*axes).all_gather(torch.tensor([network.rank])).wait()
    return gathered.tolist(), grid.line(network.rank, axes)


@pytest.mark.parametrize("axes", [("x",), ("z",), ("z", "x"), ("x", "z")])
@pytest.mark.parametrize("placement", [AXES, ("x", "data", "z", "y", "pipe")])
def test_parts_come_in_the_order_of_the_axis(
    ranks: RankPool, axes: tuple[str, ...], placement: tuple[str, ...]
) -> None:
    for gathered, line in ranks.run(4, gather_along, Grid(z=2, x=2, placement=placement), axes):
        assert gathered == line


def gather_neighbours(grid: Grid, axis: str, count: int) -> tuple[list[int], str, bool]:
    """The ranks as gathered from neighbours on an axis; what the ledger would say; and whether a group is made once."""
    network = Network(grid)
    some = network.neighbours(axis, count)
    gathered = some.all_gather(torch.tensor([network.rank])).wait()
    return gathered.tolist(), some.name, network.neighbours(axis, count) is some


@pytest.mark.parametrize("placement", [AXES, ("x", "data", "z", "y", "pipe")])
@pytest.mark.parametrize("count", [2, 4])
def test_neighbours_on_an_axis(ranks: RankPool, placement: tuple[str, ...], count: int) -> None:
    grid = Grid(y=4, x=2, placement=placement)
    for rank, (gathered, name, same) in enumerate(ranks.run(8, gather_neighbours, grid, "y", count)):
        first = grid.coordinates(rank)["y"] // count * count
        assert gathered == grid.line(rank, ("y",))[first : first + count]
        assert name == "y" and same


def all_kinds(size: int, dtype: torch.dtype, dim: int) -> dict[str, bool]:
    axis = Network(Grid(y=size)).axis("y")
    own = (torch.arange(4 * 6, dtype=dtype).view(4, 6) + axis.index).contiguous()
    everybody = torch.stack([own - axis.index + other for other in range(size)])
    parts = everybody.sum(0).chunk(size, dim)
    outgoing = [own.flatten()[: 1 + axis.index + other].clone() for other in range(size)]
    incoming = [everybody[other].flatten()[: 1 + axis.index + other] for other in range(size)]
    rooted = own.clone()
    return {
        "all_gather": torch.equal(axis.all_gather(own, dim).wait(), torch.cat(list(everybody), dim)),
        "reduce_scatter": torch.equal(axis.reduce_scatter(own, dim).wait(), parts[axis.index]),
        "all_reduce": torch.equal(axis.all_reduce(own).wait(), everybody.sum(0)),
        "largest": torch.equal(axis.all_reduce(own, largest=True).wait(), everybody[-1]),
        "broadcast": torch.equal(axis.broadcast(own.clone(), root=1).wait(), everybody[1]),
        "reduce": torch.equal(axis.reduce(rooted, root=1).wait(), everybody.sum(0)) or axis.index != 1,
        "all_to_all": torch.equal(
            axis.all_to_all(outgoing, [len(part) for part in incoming]).wait(), torch.cat(incoming)
        ),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_every_collective_means_what_it_says(ranks: RankPool, dtype: torch.dtype, dim: int) -> None:
    for verdicts in ranks.run(2, all_kinds, 2, dtype, dim):
        assert all(verdicts.values()), verdicts


def pass_on(size: int) -> float:
    """Each rank sends its number to the next."""
    axis = Network(Grid(pipe=size)).axis("pipe")
    sending = axis.send(torch.tensor([float(axis.index)]), to=(axis.index + 1) % size)
    got = axis.receive(torch.empty(1), source=(axis.index - 1) % size).wait()
    sending.wait()
    return got.item()


def test_messages_go_from_rank_to_rank(ranks: RankPool) -> None:
    assert ranks.run(3, pass_on, 3) == [2.0, 0.0, 1.0]


def ledger_of_one_each() -> dict[str, Fraction]:
    network = Network(Grid(x=4))
    axis = network.axis("x")
    block = torch.zeros(8, 4, dtype=torch.float32)  # 128 bytes
    axis.all_reduce(block).wait()  # nobody is recording
    with network.recording() as ledger:
        axis.all_gather(block, origin="gather").wait()
        axis.reduce_scatter(block, origin="scatter").wait()
        axis.all_reduce(block, origin="reduce").wait()
    received = {entry.origin: entry.received for entry in ledger.entries}
    assert ledger.by_axis() == {"x": sum(received.values())}
    return received


def test_the_ledger_counts_the_bytes_that_a_rank_receives(ranks: RankPool) -> None:
    """Of 128 bytes each in a group of 4: all-gather 3 · 128, reduce-scatter 3/4 · 128, all-reduce twice that."""
    expected = {"gather": Fraction(384), "scatter": Fraction(96), "reduce": Fraction(192)}
    assert ranks.run(4, ledger_of_one_each) == [expected] * 4


def two_grids() -> tuple[float, float]:
    rows, square = Network(Grid(z=4)), Network(Grid(y=2, x=2))
    one = torch.ones(1)
    return rows.axis("z").all_reduce(one).wait().item(), square.axis("x").all_reduce(one).wait().item()


def test_two_grids_live_in_one_process(ranks: RankPool) -> None:
    assert ranks.run(4, two_grids) == [(4.0, 2.0)] * 4


def join(grid: Grid) -> None:
    Network(grid)


def test_a_world_of_the_wrong_size_is_refused(ranks: RankPool) -> None:
    with pytest.raises(UserError, match="needs 4 ranks and this job has 2"):
        ranks.run(2, join, Grid(x=4))


def stumble(rank_that_fails: int) -> None:
    axis = Network(Grid(x=2)).axis("x")
    if axis.index == rank_that_fails:
        raise ZeroDivisionError("stumbled")
    axis.all_reduce(torch.ones(1)).wait()


def hang() -> None:
    import time

    time.sleep(60)


TASKS = Path("/proc/self/task")


def threads() -> int:
    return len(list(TASKS.iterdir()))


def work_on(grid: Grid) -> None:
    """Groups of several kinds, and a distributed tensor that torch remembers."""
    network = Network(grid)
    network.axis("x", "data").all_reduce(torch.ones(1)).wait()
    parameter = distribute(network, torch.ones(2, 2), (2 * grid.x, 2), {"x": 0})
    parameter.detach().add_(parameter.detach())


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads where Linux lists them")
def test_a_job_leaves_no_thread_behind(ranks: RankPool) -> None:
    """Each gloo group has threads that wake all the time: hundreds of them made a suite six times slower."""
    ranks.run(4, work_on, Grid(x=4))
    before = ranks.run(4, threads)
    for grid in (Grid(x=2, data=2), Grid(x=2, y=2), Grid(data=4)):
        ranks.run(4, work_on, grid)
    assert ranks.run(4, threads) == before


def test_a_rank_that_fails_or_hangs_ends_the_job_and_the_next_one_runs(ranks: RankPool) -> None:
    with pytest.raises((ZeroDivisionError, RankFailed, RuntimeError)):
        ranks.run(2, stumble, 1)
    with pytest.raises(RankFailed, match="no answer from rank 0, 1"):
        ranks.run(2, hang, timeout=1)
    assert ranks.run(3, pass_on, 3) == [2.0, 0.0, 1.0]
