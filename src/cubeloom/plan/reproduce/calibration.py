"""Three constants that no data sheet gives, each set by one published figure; nothing else is fitted.

Chimera's code communicated with gloo over TCP, at a fraction of Aries' bandwidth. Its runtime, PipeDream's, took longer
for a pass than the kernels of the pass. And the allocator and the framework need memory beyond the bytes of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log

from cubeloom.plan.hardware import Cluster, Device
from cubeloom.plan.reproduce.pipelines import Setup, run
from cubeloom.plan.reproduce.report import Point

GIB = 2**30
_ROUNDS = 4  # each of the two time constants hardly affects the other's run
Known = tuple[Setup, Point]  # a run, and its published figure


@dataclass(frozen=True)
class Calibrated:
    cluster: Cluster
    pace: float  # seconds per second of kernels
    growth: float  # bytes of memory per byte of activations


def calibrate(cluster: Cluster, network: Known, passes: Known, memory: Known) -> Calibrated:
    """NIC bandwidth from the throughput of a run that reduces much, pace from one that hardly does; growth from memory."""
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
    """Where a growing function has the wanted value, by bisection; an end of the range if it has it nowhere."""
    low, high = map(log, between)
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if function(exp(middle)) < wanted.value else (low, middle)
    return exp((low + high) / 2)
