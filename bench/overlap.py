"""How much of the shorter of computing and communicating is hidden: by two strands, and by a bare pair in the same run.

The bare pair is an all-reduce behind matmuls that take as long, with nothing else on the device.
"""

from __future__ import annotations

import time
from unittest.mock import patch

import torch
from torch import Tensor

from bench.peers.timing import Step, Timed
from cubeloom.comm import Axis, Ledger, Network, Pending, devices

PAIR = ("matmuls alone", "all-reduce alone", "all-reduce behind matmuls")
SUMS = "the sums of a step alone"
COMPUTING = "the rest of a step alone"


def bare_pair(network: Network, side: int, nbytes: int) -> dict[str, Step]:
    """Matmuls of square matrices of this side, as many as take as long as the all-reduce of so many bytes."""
    axis, device = network.axis("y"), network.device
    dtype = torch.float32 if device.type == devices.CPU else torch.bfloat16
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    message = torch.ones(nbytes // dtype.itemsize, device=device, dtype=dtype)

    def reduce() -> None:
        axis.all_reduce_in_place(message).wait()

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    # All ranks must come to the same count.
    ratio = torch.tensor([_seconds(reduce, device) / _seconds(lambda: multiply(10), device)], device=device)
    count = max(1, round(10 * axis.all_reduce(ratio, largest=True).wait().item()))

    def both() -> None:
        under_way = axis.all_reduce_in_place(message)
        multiply(count)
        under_way.wait()

    return dict(zip(PAIR, (lambda: multiply(count), reduce, both), strict=True))


def sums_of(network: Network, ledger: Ledger) -> Step:
    """The all-reduces that a step did, one after the other."""
    sizes = [entry.size for entry in ledger.entries if entry.operation == "all_reduce"]
    longest = torch.ones(max(sizes), device=network.device, dtype=torch.uint8)

    def run() -> None:
        for size in sizes:
            network.axis("y").all_reduce_in_place(longest[:size]).wait()

    return run


def without_sums(step: Step) -> Step:
    """A step that takes each rank's numbers for the sum of all; so it computes as much, but nothing that is right."""

    def taken_as_it_is(_: Axis, tensor: Tensor, *__: object, **___: object) -> Pending:
        return Pending(tensor)

    def run() -> Tensor | None:
        with patch.object(Axis, "all_reduce_in_place", taken_as_it_is):
            return step()

    return run


def hidden(timed: list[Timed], one: str, two: str) -> dict[str, float]:
    """Shares of the shorter that are hidden: by the bare pair, and by two strands beside one."""
    ms = {each.name: each.step_ms for each in timed}
    computing, summing, together = (ms[name] for name in PAIR)
    return {
        "pair": (computing + summing - together) / min(computing, summing),
        "strands": (ms[one] - ms[two]) / min(ms[COMPUTING], ms[SUMS]),
    }


def _seconds(step: Step, device: torch.device) -> float:
    step()
    devices.settle(device)
    began = time.perf_counter()
    step()
    devices.settle(device)
    return time.perf_counter() - began
