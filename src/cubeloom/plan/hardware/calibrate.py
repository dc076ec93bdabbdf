"""From measurements to a device and a cluster that the closed forms work with. Pure: what measures is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

import numpy as np

from cubeloom.plan.costs import Quantity, all_gather, all_reduce, matmul, send
from cubeloom.plan.hardware.cluster import Cluster
from cubeloom.plan.hardware.device import Device, Dtype
from cubeloom.plan.hardware.facts import Fact
from cubeloom.plan.hardware.measured import DeviceMeasurements, Shape, Transfer

_TILES = ((8, 8), (16, 16), (32, 32), (64, 64), (128, 64), (128, 128), (128, 256), (256, 128))
_CLOSED: dict[str, Callable[..., Quantity]] = {"all_reduce": all_reduce, "all_gather": all_gather, "send": send}
_LOW = 1e-9  # seconds, where noise made a large transfer as fast as a small one


def fitted_device(name: str, found: DeviceMeasurements, source: str) -> tuple[Device, float]:
    """The device, and by how much its closed form misses the measured products, in the mean, as a fraction.

    The peak of each dtype is the best that was seen, so that the fraction of it that large products get is 1; the tile is
    the one that explains the others best.
    """

    def fact(value: float) -> Fact:
        return Fact(_rounded(value), source, "measured")

    facts: dict[str, Fact] = {
        **{dtype: fact(max(_rates(times))) for dtype, times in found.products.items()},
        "matmul_fraction": fact(1.0),
        "processors": fact(found.processors),
        "memory": fact(found.memory),
        "bandwidth": fact(found.bandwidth),
        "bandwidth_fraction": fact(1.0),
        "launch": fact(found.launch),
        "host": fact(found.host),
    }
    candidates = []
    for rows, columns in _TILES:
        whole = {**facts, "tile_rows": fact(rows), "tile_columns": fact(columns)}
        made = Device(name=name, about=found.what, **_plain(whole), facts=whole)
        candidates.append((_misses(made, found.products), made))
    missed, best = min(candidates, key=lambda each: each[0])
    return best, missed


def fitted_cluster(
    name: str, device: Device, per_node: int, transfers: Iterable[Transfer], source: str, crowd: float
) -> Cluster:
    """One node of so many devices. `crowd`: the share of computation that a transfer is taken to cost, which is not measured.

    The smallest messages and all-reduces give latency, over the number of hops; what the largest all-reduces take more gives
    bandwidth: of a pair in the smallest group, of all links of a device in the largest. All-gathers are left to be predicted.
    """
    listed = list(transfers)
    start, hop = _latency(listed)
    rates = _bandwidths(listed) or {1: device.bandwidth}
    link, pair = rates[max(rates)], rates[min(rates)]

    def fact(value: float) -> Fact:
        if listed:
            return Fact(_rounded(value), source, "measured")
        return Fact(_rounded(value), "one device: no link to measure; as its memory", "estimated")

    def beyond(value: float) -> Fact:
        return Fact(_rounded(value), "one machine: nothing to measure between nodes; as inside it", "estimated")

    facts = {
        "nodes": Fact(1, source, "measured"),
        "devices_per_node": Fact(per_node, source, "measured"),
        "link_bandwidth": fact(link),
        "pair_bandwidth": fact(pair),
        "link_latency": fact(hop),
        "link_drag": Fact(crowd, "not measured", "estimated"),
        "nics": beyond(1),
        "nic_bandwidth": beyond(link),
        "nic_latency": beyond(hop),
        "nic_drag": Fact(crowd, "not measured", "estimated"),
        "start": fact(start),
        "eager_fraction": Fact(0, "not measured: one protocol", "estimated"),
    }
    return Cluster(name=name, about=f"{per_node} × {device.about}", device=device, **_plain(facts), facts=facts)


def missed_transfers(cluster: Cluster, transfers: Iterable[Transfer]) -> float | None:
    """By how much the closed forms miss what was measured, in the mean, as a fraction; None where nothing was."""
    off = [
        abs(float(_CLOSED[each.operation](cluster, each.nbytes, each.group)) / each.seconds - 1) for each in transfers
    ]
    return fmean(off) if off else None


def _rounded(value: float) -> float:
    """What is counted stays as it is; of what is measured, more than four digits are noise."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _plain(facts: Mapping[str, Fact]) -> dict[str, Any]:
    return {name: fact.value for name, fact in facts.items()}


def _rates(times: Mapping[Shape, float]) -> list[float]:
    return [2 * m * n * k / seconds for (m, n, k), seconds in times.items()]


def _misses(device: Device, products: Mapping[Dtype, Mapping[Shape, float]]) -> float:
    off = [
        abs(float(matmul(device, m, n, k, dtype)) / seconds - 1)
        for dtype, times in products.items()
        for (m, n, k), seconds in times.items()
    ]
    return fmean(off)


def _latency(transfers: list[Transfer]) -> tuple[float, float]:
    """Start and hop, from what is too small to take time for its bytes: a message is one hop, a ring of g ranks 2(g-1)."""
    if not transfers:
        return 0.0, 0.0
    least = min(each.nbytes for each in transfers)
    small = [each for each in transfers if each.nbytes <= 2 * least and each.operation in ("send", "all_reduce")]
    hops = np.array([1 if each.operation == "send" else 2 * (each.group - 1) for each in small], float)
    seconds = np.array([each.seconds for each in small])
    hop, start = np.polyfit(hops, seconds, 1)
    if start < 0 or hop < 0:  # noise; then all is hops
        return 0.0, float(np.mean(seconds / hops))
    return float(start), float(hop)


def _bandwidths(transfers: list[Transfer]) -> dict[int, float]:
    """Bytes that a rank moves a second, by the size of the group."""
    rates = {}
    for group in {each.group for each in transfers}:
        sizes = sorted((t.nbytes, t.seconds) for t in transfers if t.group == group and t.operation == "all_reduce")
        (small, short), (large, long) = sizes[0], sizes[-1]
        rates[group] = 2 * (group - 1) / group * (large - small) / max(_LOW, long - short)
    return rates
