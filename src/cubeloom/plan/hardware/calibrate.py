"""From measurements to a device and a cluster that the closed forms work with. Pure: what measures is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from cubeloom.plan.costs import (
    Quantity,
    all_gather,
    all_reduce,
    all_to_all,
    fused_attention,
    matmul,
    memory_bound,
    reduce_scatter,
    send,
)
from cubeloom.plan.hardware.cluster import Cluster
from cubeloom.plan.hardware.device import Device
from cubeloom.plan.hardware.facts import Fact
from cubeloom.plan.hardware.measured import DeviceMeasurements, Shape, Transfer

_DRAG = 0.15  # the share of computation that a transfer is taken to cost where none was measured
_TILES = ((8, 8), (16, 16), (32, 32), (64, 64), (128, 64), (128, 128), (128, 256), (256, 128))
_CLOSED: dict[str, Callable[..., Quantity]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "send": send,
}
_LOW = 1e-9  # seconds, where noise made a large transfer as fast as a small one
_UPDATE = 32  # bytes that AdamW reads and writes for a parameter of float32


def fitted_device(name: str, found: DeviceMeasurements, source: str) -> Device:
    """The peak of each dtype is the best that was seen, so that the fraction of it that large products get is 1; the
    tile is the one that explains the others best.
    """

    def fact(value: float, scatter: float | None = None) -> Fact:
        return Fact(_rounded(value), source, "measured", None if scatter is None else _rounded(scatter))

    nbytes, largest = max(found.operators.items())
    bandwidth = nbytes / max(_LOW, largest - found.launch)
    count, updating = found.update
    facts: dict[str, Fact] = {
        **{dtype: fact(max(_rates(times))) for dtype, times in found.products.items()},
        "matmul_fraction": fact(1.0),
        "processors": fact(found.processors),
        "memory": fact(found.memory),
        "bandwidth": fact(bandwidth),
        "bandwidth_fraction": fact(1.0),
        "launch": fact(found.launch),
        "host": fact(found.host),
        "update_fraction": fact(_UPDATE * count / max(_LOW, updating - found.launch) / bandwidth),
    }
    candidates = []
    for rows, columns in _TILES:
        whole = {**facts, "tile_rows": fact(rows), "tile_columns": fact(columns)}
        made = Device(name=name, about=found.what, **_plain(whole), facts=whole)
        candidates.append((_scatter(_products(made, found)), made))
    scatter, best = min(candidates, key=lambda each: each[0])
    operators = _scatter([float(memory_bound(best, size)) / took for size, took in found.operators.items()])
    facts = {
        **best.facts,
        "matmul_fraction": fact(1.0, scatter),
        "bandwidth_fraction": fact(1.0, operators),
        **_attention(best, found, fact),
    }
    return replace(best, **_plain(facts), facts=facts)


def _attention(device: Device, found: DeviceMeasurements, fact: Callable[[float, float], Fact]) -> dict[str, Fact]:
    """The fractions of the peak at which the closed form takes as long as was measured, in the median."""
    whole = replace(device, attention_forward=1.0, attention_backward=1.0)
    made: dict[str, Fact] = {}
    for place, way in enumerate(("forward", "backward") if found.attention else ()):
        ratios = []
        for (length, heads, features), took in found.attention.items():
            ideal = fused_attention(whole, length, features, heads, True, found.attention_dtype)[place]
            ratios.append(float(ideal) / max(_LOW, took[place] - device.launch))
        fraction = median(ratios)
        made[f"attention_{way}"] = fact(fraction, _scatter([ratio / fraction for ratio in ratios]))
    return made


def fitted_cluster(
    name: str,
    device: Device,
    per_node: int,
    nodes: int,
    transfers: Iterable[Transfer],
    drags: Mapping[tuple[int, int], float],
    source: str,
) -> Cluster:
    """So many nodes of so many devices.

    The smallest messages and all-reduces give latency, over the number of hops; what the largest all-reduces take more
    gives bandwidth: of a pair in the smallest group, of all links of a device in the largest; and of a node, whose
    devices all leave it at once. Other operations, and other strides, are left to be predicted.
    """
    listed = list(transfers)
    inside, across = _inside(listed, per_node), [each for each in listed if each.rank_stride == per_node and nodes > 1]
    start, hop = _latency(inside)
    rates = _bandwidths(inside) or {1: device.bandwidth}
    link, pair = rates[max(rates)], rates[min(rates)]
    leaving = _bandwidths(across).get(nodes, 0.0) * per_node
    farther = _latency(across, start)[1]

    def fact(
        value: float, seen: bool = bool(inside), alone: str = "one device: no link to measure; as its memory"
    ) -> Fact:
        return Fact(_rounded(value), source, "measured") if seen else Fact(_rounded(value), alone, "estimated")

    def beyond(value: float) -> Fact:
        return fact(value, bool(across), "one machine: nothing to measure between nodes; as inside it")

    def drag(beyond_node: bool) -> Fact:
        seen = [share for (group, stride), share in drags.items() if (group * stride > per_node) == beyond_node]
        if seen:
            return Fact(_rounded(max(seen)), source, "measured")
        return Fact(_rounded(max(drags.values(), default=_DRAG)), "not measured; as inside a node", "estimated")

    facts = {
        "nodes": Fact(nodes, source, "measured"),
        "devices_per_node": Fact(per_node, source, "measured"),
        "link_bandwidth": fact(link),
        "pair_bandwidth": fact(pair),
        "link_latency": fact(hop),
        "link_drag": drag(False),
        "nics": beyond(1),
        "nic_bandwidth": beyond(leaving if across else link),
        "nic_latency": beyond(max(hop, farther) if across else hop),
        "nic_drag": drag(True),
        "start": fact(start),
        "eager_fraction": Fact(0, "not measured: one protocol", "estimated"),
    }
    about = f"{per_node} × {device.about}" if nodes == 1 else f"{nodes} nodes of {per_node} × {device.about}"
    made = Cluster(name=name, about=about, device=device, **_plain(facts), facts=facts)
    scatters = {"link_bandwidth": _missed(made, inside), "nic_bandwidth": _missed(made, across)}
    sized = {each: replace(facts[each], scatter=_rounded(off)) for each, off in scatters.items() if off is not None}
    return replace(made, facts={**facts, **sized})


def _missed(cluster: Cluster, transfers: Iterable[Transfer]) -> float | None:
    """The scatter of the closed forms around what was measured; None where nothing was."""
    ratios = [
        float(_CLOSED[each.operation](cluster, each.nbytes, each.group, each.rank_stride)) / each.seconds
        for each in transfers
    ]
    return _scatter(ratios) if ratios else None


def _scatter(ratios: Sequence[float]) -> float:
    """One standard deviation of what was predicted from what was measured, as a share."""
    return float(np.sqrt(np.mean(np.log(ratios) ** 2)))


def _inside(transfers: Iterable[Transfer], per_node: int) -> list[Transfer]:
    return [each for each in transfers if each.group * each.rank_stride <= per_node]


def _rounded(value: float) -> float:
    """What is counted stays as it is; of what is measured, more than four digits are noise."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _plain(facts: Mapping[str, Fact]) -> dict[str, Any]:
    return {name: fact.value for name, fact in facts.items()}


def _rates(times: Mapping[Shape, float]) -> list[float]:
    return [2 * m * n * k / seconds for (m, n, k), seconds in times.items()]


def _products(device: Device, found: DeviceMeasurements) -> list[float]:
    """What each product is predicted to take, over what it took."""
    return [
        float(matmul(device, m, n, k, dtype)) / seconds
        for dtype, times in found.products.items()
        for (m, n, k), seconds in times.items()
    ]


def _latency(transfers: list[Transfer], known: float | None = None) -> tuple[float, float]:
    """Start and hop, from what is too small to take time for its bytes: a message is one hop, a ring of g ranks 2(g-1).

    `known`: the start, if it is.
    """
    if not transfers:
        return 0.0, 0.0
    least = min(each.nbytes for each in transfers)
    small = [each for each in transfers if each.nbytes <= 2 * least and each.operation in ("send", "all_reduce")]
    hops = np.array([1 if each.operation == "send" else 2 * (each.group - 1) for each in small], float)
    seconds = np.array([each.seconds for each in small])
    if known is not None:
        return known, max(0.0, float(np.mean((seconds - known) / hops)))
    hop, start = np.polyfit(hops, seconds, 1)
    if start < 0 or hop < 0:  # noise; then all is hops
        return 0.0, float(np.mean(seconds / hops))
    return float(start), float(hop)


def _bandwidths(transfers: list[Transfer]) -> dict[int, float]:
    """Bytes that a rank moves a second, by the size of the group; of its strides, on the slowest."""
    rates: dict[int, float] = {}
    for group, stride in {(each.group, each.rank_stride) for each in transfers}:
        sizes = sorted(
            (t.nbytes, t.seconds)
            for t in transfers
            if (t.group, t.rank_stride, t.operation) == (group, stride, "all_reduce")
        )
        (small, short), (large, long) = sizes[0], sizes[-1]
        rate = 2 * (group - 1) / group * (large - small) / max(_LOW, long - short)
        rates[group] = min(rate, rates.get(group, rate))
    return rates
