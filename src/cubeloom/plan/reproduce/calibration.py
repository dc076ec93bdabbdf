"""Three constants that no data sheet has, each set by one published figure; nothing else is fitted.

Chimera's code communicated with gloo over TCP, at a part of what Aries can do. Its runtime, PipeDream's, took longer for a pass
than the kernels of the pass. And what lies between the bytes of tensors and those of a full device is the allocator's and the
framework's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log

from cubeloom.plan.hardware import Cluster, Device
from cubeloom.plan.reproduce.pipelines import Setup, run
from cubeloom.plan.reproduce.report import Point

GIB = 2**30
_ROUNDS = 4  # each of the two constants of time hardly moves the other's run
Known = tuple[Setup, Point]  # a run, and what was published of it


@dataclass(frozen=True)
class Calibrated:
    cluster: Cluster
    pace: float  # seconds that a second of kernels takes
    growth: float  # bytes that a byte of activations takes


def calibrate(cluster: Cluster, network: Known, passes: Known, memory: Known) -> Calibrated:
    """Bandwidth of NICs by the throughput of a run that sums much, pace by one that hardly does; growth by memory."""
    growth = _solve(lambda tried: run(memory[0], cluster, tried, recompute=False).memory / GIB, memory[1], (0.5, 5.0))
    bandwidth, pace = cluster.nic_bandwidth, 1.0

    def rate(setup: Setup, bandwidth: float, pace: float) -> float:
        return run(setup, _changed(cluster, bandwidth, pace), growth, recompute=False).throughput

    for _ in range(_ROUNDS):
        speed = _solve(lambda tried: rate(passes[0], bandwidth, 1 / tried), passes[1], (0.2, 5.0))  # noqa: B023
        pace = 1 / speed
        bandwidth = _solve(lambda tried: rate(network[0], tried, pace), network[1], (1e7, 1e11))  # noqa: B023
    return Calibrated(_changed(cluster, bandwidth, pace), pace, growth)


def _changed(cluster: Cluster, bandwidth: float, pace: float) -> Cluster:
    return replace(cluster, nic_bandwidth=bandwidth, device=_slower(cluster.device, pace))


def _slower(device: Device, pace: float) -> Device:
    return replace(
        device,
        fp32=device.fp32 / pace,
        bandwidth=device.bandwidth / pace,
        launch=device.launch * pace,
        host=device.host * pace,
    )


def _solve(function: Callable[[float], float], wanted: Point, between: tuple[float, float]) -> float:
    """Where a growing function has the wanted value, by halving; an end of the range if it has it nowhere."""
    low, high = map(log, between)
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if function(exp(middle)) < wanted.value else (low, middle)
    return exp((low + high) / 2)
