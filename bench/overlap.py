"""How much of the shorter of computing and communicating is hidden: in a step, and by a bare pair in the same run.

The bare pair is an all-reduce behind matmuls that take as long, with nothing else on the device. Of a step, its sums and its
computing are timed alone as well. The network's speed drifts by more than what is looked for, but slowly: so all of these take
turns step by step. Shares are those of the medians; beside them stand the quartiles of the turns' own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median, quantiles
from unittest.mock import patch

import torch
from rich.table import Table
from torch import Tensor

from bench.peers.timing import Step, Timed
from cubeloom.comm import Axis, Ledger, Network, Pending, devices

PAIR = ("matmuls alone", "all-reduce alone", "all-reduce behind matmuls")
SUMS = "the sums of a step alone"
HALVES = "the same in halves, as two strands do"
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


@dataclass(frozen=True)
class Hidden:
    """Recipes that took turns step by step: the bare pair, a step's two parts alone, and whole steps."""

    title: str
    timed: list[Timed]

    def shares(self) -> dict[str, list[float]]:
        """Of the shorter, what was hidden in each turn."""
        ms = {each.name: each.steps_ms for each in self.timed}
        return {
            name: [_share(*turn) for turn in zip(ms[one], ms[other], ms[name], strict=True)]
            for name, (one, other) in self._parts().items()
        }

    def share(self, name: str) -> float:
        """Of the shorter, what was hidden, by the medians."""
        ms = {each.name: each.step_ms for each in self.timed}
        one, other = self._parts()[name]
        return _share(ms[one], ms[other], ms[name])

    def _parts(self) -> dict[str, tuple[str, str]]:
        alone = {*PAIR, COMPUTING, SUMS, HALVES}
        whole = [each.name for each in self.timed if each.name not in alone]
        return {PAIR[2]: PAIR[:2], **dict.fromkeys(whole, (COMPUTING, SUMS))}

    def table(self) -> Table:
        found = Table("", "ms", "quartiles", "hidden", "quartiles", title=self.title)
        shares = self.shares()
        for each in self.timed:
            low, middle, high = quantiles(each.steps_ms)
            row = [each.name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}"]
            if each.name in shares:
                low, _, high = quantiles(shares[each.name])
                row += [f"{self.share(each.name):.0%}", f"{low:.0%} to {high:.0%}"]
            found.add_row(*row)
        return found


def _share(one: float, other: float, together: float) -> float:
    return (one + other - together) / min(one, other)


def _seconds(step: Step, device: torch.device) -> float:
    found = []
    for _ in range(6):
        devices.settle(device)
        began = time.perf_counter()
        step()
        devices.settle(device)
        found.append(time.perf_counter() - began)
    return median(found[1:])
