"""Measures how fast ranks of this machine communicate, and whether their clocks agree."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cubeloom.base.grid import Grid
from cubeloom.comm import Axis, Network, devices
from cubeloom.launch import RankPool
from cubeloom.tools.doctor.facts import Links

_PINGS = 50
_LARGE = 1 << 20  # float32 elements: 4 MiB
_SECONDS = 0.3  # approximate time per measurement of a large message
_MOST = 50
_PATIENCE = 60.0  # seconds to wait for ranks that do not answer


class Pair(NamedTuple):
    """What rank 0 measured with another rank."""

    latency: float
    bandwidth: float
    skew: float
    skew_error: float


def measure_links(kind: devices.Kind, ranks: int) -> Links:
    """Start ranks and let them measure. A failure is a fact too."""
    backend = devices.BACKENDS[kind]
    version = backend_version(kind)
    try:
        with RankPool(ranks, kind) as pool:
            pairs, reduced = pool.run(ranks, measure, kind, ranks, timeout=_PATIENCE)[0]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Links(kind=kind, backend=backend, version=version, ranks=ranks, failure=reason)
    furthest = max(pairs, key=lambda pair: abs(pair.skew))
    return Links(
        kind=kind,
        backend=backend,
        version=version,
        ranks=ranks,
        latency=max(pair.latency for pair in pairs),
        bandwidth=min(pair.bandwidth for pair in pairs),
        all_reduce=reduced,
        skew=furthest.skew,
        skew_error=furthest.skew_error,
    )


def backend_version(kind: devices.Kind) -> str | None:
    """The version of the backend, if the device's torch module knows it."""
    if not devices.count(kind) or not devices.available(kind):
        return None
    library = getattr(torch.get_device_module(kind), devices.BACKENDS[kind], None)
    return None if library is None else ".".join(map(str, library.version()))


def measure(kind: devices.Kind, ranks: int) -> tuple[list[Pair], float]:
    """Run by every rank of the job at once; rank 0's result is used."""
    network = Network(Grid(data=ranks), devices.current(kind))
    axis = network.axis("data")
    pairs = [_pair(network, axis, other) for other in range(1, ranks)]
    large = torch.ones(_LARGE, device=network.device)
    seconds = _repeated(network, lambda: axis.all_reduce(large).wait())
    return pairs, 2 * (ranks - 1) / ranks * large.nbytes / seconds


def _pair(network: Network, axis: Axis, other: int) -> Pair:
    """Rank 0 and another rank measure; the others wait."""
    small = torch.zeros(1, dtype=torch.float64, device=network.device)
    trips = [_ping(network, axis, other, small) for _ in range(_PINGS)][1:]  # the first trip opens the connection
    large = torch.ones(_LARGE, device=network.device)
    seconds = _repeated(network, lambda: _there_and_back(axis, other, large))
    # The quickest trip gives the most precise difference of clocks: the other clock was read during it.
    trip, skew = min(trips)
    return Pair(
        latency=statistics.median(seconds for seconds, _ in trips) / 2,
        bandwidth=2 * large.nbytes / seconds,
        skew=skew,
        skew_error=trip / 2,
    )


def _there_and_back(axis: Axis, other: int, tensor: Tensor) -> None:
    if axis.index == 0:
        axis.send(tensor, other).wait()
        axis.receive(tensor, other).wait()
    elif axis.index == other:
        axis.receive(tensor, 0).wait()
        axis.send(tensor, 0).wait()


def _ping(network: Network, axis: Axis, other: int, small: Tensor) -> tuple[float, float]:
    """The seconds of a round trip, and how far the other's wall clock is ahead."""
    if axis.index == other:
        axis.receive(small, 0).wait()
        devices.settle(network.device)
        small.fill_(time.time())
        axis.send(small, 0).wait()
    if axis.index != 0:
        return 0.0, 0.0
    begin, wall = time.perf_counter(), time.time()
    axis.send(small, other).wait()
    axis.receive(small, other).wait()
    theirs = small.item()  # waits for the device
    trip = time.perf_counter() - begin
    return trip, theirs - (wall + trip / 2)


def _repeated(network: Network, action: Callable[[], object]) -> float:
    """Mean seconds per repetition, of as many as fit into the time. Rank 0's first one decides the number for all
    ranks.
    """
    action()
    once = _timed(network, action, 1)
    told = torch.tensor([once], dtype=torch.float64, device=network.device)
    slowest = network.axis("data").all_reduce(told, largest=True).wait().item()
    times = max(1, min(_MOST, int(_SECONDS / slowest)))
    return _timed(network, action, times) / times


def _timed(network: Network, action: Callable[[], object], times: int) -> float:
    network.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        action()
    devices.settle(network.device)
    return time.perf_counter() - begin
