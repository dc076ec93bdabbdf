"""Flows that share links fairly: their rates, and when each ends.

Max-min fair: no flow can be faster without slowing another that is not faster. Computed by filling: all flows grow at
the same rate until a link is full; its flows keep that rate, and the others grow on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Flow:
    """A number of bytes over a path of links (indices into a list of capacities), from `start` on."""

    nbytes: float
    path: tuple[int, ...]
    start: float = 0.0


def fair_rates(paths: Sequence[Sequence[int]], capacities: Sequence[float] | Floats) -> Floats:
    """The max-min fair rate of each path. A path without links is infinitely fast."""
    flow, link = _uses(paths)
    return _filled(flow, link, np.asarray(capacities, float), len(paths))


def completions(flows: Sequence[Flow], capacities: Sequence[float] | Floats) -> Floats:
    """When each flow ends, in seconds. Rates are computed again whenever a flow starts or ends."""
    capacity = np.asarray(capacities, float)
    use_flow, use_link = _uses([flow.path for flow in flows])
    left = np.array([flow.nbytes for flow in flows], float)
    starts = np.array([flow.start for flow in flows], float)
    ends = np.full(len(flows), np.inf)
    now = 0.0
    while np.isinf(ends).any():
        live = (starts <= now) & np.isinf(ends)
        if not live.any():
            now = starts[np.isinf(ends)].min()
            continue
        uses = live[use_flow]
        rate = _filled(use_flow[uses], use_link[uses], capacity, len(flows))
        need = np.where(live, left / rate, np.inf)
        coming = starts[starts > now].min(initial=np.inf) - now
        step = min(need.min(), coming)
        ended = need <= step * (1 + 1e-12)
        going = live & ~ended
        left[going] -= rate[going] * step
        now += step
        ends[ended] = now
    return ends


def _uses(paths: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs (flow, link): every use of a link by a flow."""
    lengths = [len(path) for path in paths]
    flow = np.repeat(np.arange(len(paths)), lengths)
    return flow, np.array([link for path in paths for link in path], np.int64)


def _filled(flow: NDArray[np.int64], link: NDArray[np.int64], capacity: Floats, count: int) -> Floats:
    rate = np.full(count, np.inf)
    room = capacity.copy()
    while flow.size:
        users = np.bincount(link, minlength=room.size)
        share = np.divide(room, users, out=np.full(room.size, np.inf), where=users > 0)
        level = share.min()
        full = share <= level * (1 + 1e-12)
        settled = np.zeros(count, bool)
        settled[flow[full[link]]] = True
        rate[settled] = level
        going = settled[flow]
        room = np.maximum(0.0, room - level * np.bincount(link[going], minlength=room.size))
        flow, link = flow[~going], link[~going]
    return rate
