"""What runs on ranks to measure what joins them: collectives and messages by size, group and stride; and their drag."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from math import ceil

import torch

from cubeloom.base.grid import Grid
from cubeloom.comm import Axis, Network, devices
from cubeloom.plan.hardware.measured import Transfer, undisturbed

_SIDE = {True: 512, False: 4096}  # of the product that runs beside a transfer, on the host or a GPU
_LONGER = 1.5  # that products take than the transfer that they hide


def network_of(kind: devices.Kind, ranks: int, group: int, rank_stride: int) -> Network:
    """All ranks, in groups of this many along x, with so many ranks between neighbours."""
    outside = ranks // (group * rank_stride)
    grid = Grid(data=outside, x=group, y=rank_stride, placement=("pipe", "data", "z", "x", "y"))
    return Network(grid, devices.current(kind), num_comm_channels=devices.num_comm_channels(kind, ranks))


def measure_links(network: Network, rank_stride: int, sizes: tuple[int, ...], repeats: int) -> list[Transfer]:
    """Every operation along x, in all groups at once, by size. Ranks are timed from a common start to their own end."""
    axis, device = network.axis("x"), network.device
    found = []
    for nbytes in sizes:
        whole = torch.ones(max(1, nbytes // 4 // axis.size) * axis.size, device=device)  # float32
        for operation, job in _JOBS.items():
            taken = _times(network, partial(job, axis, whole), repeats)
            found.append(Transfer(operation, axis.size, whole.nbytes, undisturbed(taken), rank_stride))
            whole.fill_(1.0)
    return found


def measure_drag(network: Network, nbytes: int, repeats: int) -> float:
    """The share of its computation that a device loses while an all-reduce along x runs."""
    axis, device = network.axis("x"), network.device
    whole = torch.ones(nbytes // 4, device=device)
    left = torch.randn(_SIDE[device.type == devices.CPU], _SIDE[device.type == devices.CPU], device=device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(left, left)

    def both(count: int) -> None:
        pending = axis.all_reduce_in_place(whole)
        products(count)
        pending.wait()

    transfer = undisturbed(_times(network, partial(_reduce, axis, whole), repeats))
    one = undisturbed(_times(network, partial(products, 1), repeats))
    # All ranks compute as much: otherwise one would wait for another's transfer.
    count = network.host_group.follow_first(lambda: max(1, ceil(_LONGER * transfer / one)))
    alone = undisturbed(_times(network, partial(products, count), repeats))
    together = undisturbed(_times(network, partial(both, count), repeats))
    return min(1.0, max(0.0, (together - alone) / transfer))


def _times(network: Network, job: Callable[[], object], repeats: int) -> list[float]:
    """Without the first, which connects."""
    return [_timed(network, job) for _ in range(repeats + 1)][1:]


def _timed(network: Network, job: Callable[[], object]) -> float:
    network.barrier()
    devices.settle(network.device)
    begin = time.perf_counter()
    job()
    devices.settle(network.device)
    return time.perf_counter() - begin


def _reduce(axis: Axis, whole: torch.Tensor) -> None:
    axis.all_reduce_in_place(whole).wait()


def _gather(axis: Axis, whole: torch.Tensor) -> None:
    axis.all_gather(whole[: len(whole) // axis.size]).wait()


def _scatter(axis: Axis, whole: torch.Tensor) -> None:
    axis.reduce_scatter(whole).wait()


def _exchange(axis: Axis, whole: torch.Tensor) -> None:
    parts = list(whole.chunk(axis.size))
    axis.all_to_all(parts, [len(part) for part in parts]).wait()


def _pass_on(axis: Axis, message: torch.Tensor) -> None:
    """From the first rank to the second; the others watch."""
    if axis.index == 0:
        axis.send(message, 1).wait()
    elif axis.index == 1:
        axis.receive(message, 0).wait()


_JOBS: dict[str, Callable[[Axis, torch.Tensor], None]] = {
    "all_reduce": _reduce,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "send": _pass_on,
}
