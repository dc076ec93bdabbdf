"""What runs on ranks to measure what joins them: all-reduces, all-gathers and messages, by size."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from cubeloom.base.grid import Grid
from cubeloom.comm import Axis, Network, devices
from cubeloom.plan.hardware.measured import Transfer, undisturbed


def measure_links(kind: devices.Kind, group: int, sizes: tuple[int, ...], repeats: int) -> list[Transfer]:
    """Every operation over all ranks of this job, for every size. Ranks are timed from a common start to their own end."""
    device = devices.current(kind)
    network = Network(Grid(x=group), device, lanes=devices.lanes(kind, group))
    axis = network.axis("x")
    found = []
    for nbytes in sizes:
        whole = torch.ones(max(group, nbytes // 4 // group * group), device=device)  # float32
        for operation, job in _JOBS.items():
            taken = [_timed(network, partial(job, axis, whole), device) for _ in range(repeats + 1)][
                1:
            ]  # the first connects
            found.append(Transfer(operation, group, whole.nbytes, undisturbed(taken)))
            whole.fill_(1.0)
    return found


def _timed(network: Network, job: Callable[[], object], device: torch.device) -> float:
    network.barrier()
    devices.settle(device)
    begin = time.perf_counter()
    job()
    devices.settle(device)
    return time.perf_counter() - begin


def _reduce(axis: Axis, whole: torch.Tensor) -> None:
    axis.all_reduce_in_place(whole).wait()


def _gather(axis: Axis, whole: torch.Tensor) -> None:
    axis.all_gather(whole[: len(whole) // axis.size]).wait()


def _pass_on(axis: Axis, message: torch.Tensor) -> None:
    """From the first rank to the second; the others watch."""
    if axis.index == 0:
        axis.send(message, 1).wait()
    elif axis.index == 1:
        axis.receive(message, 0).wait()


_JOBS: dict[str, Callable[[Axis, torch.Tensor], None]] = {
    "all_reduce": _reduce,
    "all_gather": _gather,
    "send": _pass_on,
}
