"""Constants from measured steps: robust least squares on the logarithms of times, from the numbers of the cluster's file.

Constants are positive and known to a factor at best, so that their logarithms are fitted, and one that moves by `_SPREAD`
costs as much as a run that is `_NOISE` off: few runs do not lead far from the file, many do. A run that is far off
counts by its distance, not its square, so that stragglers do not bend the fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cubeloom.plan.hardware import Cluster
from cubeloom.plan.validate.step import Constants, step_seconds
from cubeloom.plan.validate.table import Floats, Runs

_SPREAD = 0.5
_NOISE = 0.05
_ROUNDS = 60
_SLIGHT = 1e-4  # for derivatives
_STOP = 1e-6  # of the cost


def fit(runs: Runs, seconds: Floats, start: Cluster) -> Constants:
    """The constants under which these runs take about these times."""
    first = Constants(start)

    def misses(moved: Floats) -> Floats:
        return np.log(step_seconds(moved_by(first, moved), runs) / seconds) / _NOISE

    return moved_by(first, descend(misses, np.zeros(7)))


def moved_by(first: Constants, moved: Floats) -> Constants:
    """The constants, each times e to its entry."""
    matmul, host, link, nic, start, passes, optimizer = np.exp(moved).tolist()
    cluster, device = first.cluster, first.cluster.device
    return Constants(
        cluster=replace(
            cluster,
            device=replace(device, matmul_fraction=device.matmul_fraction * matmul, host=device.host * host),
            link_bandwidth=cluster.link_bandwidth * link,
            pair_bandwidth=cluster.pair_bandwidth * link,
            nic_bandwidth=cluster.nic_bandwidth * nic,
            start=cluster.start * start,
        ),
        passes=first.passes * passes,
        optimizer_bytes=first.optimizer_bytes * optimizer,
    )


def descend(misses: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Levenberg and Marquardt's way down: Gauss-Newton steps, shortened until they help."""
    at, damping = start, 1e-2
    here = misses(at)
    least = _cost(here, at, start)
    for _ in range(_ROUNDS):
        slopes = np.stack([(misses(at + _SLIGHT * way) - here) / _SLIGHT for way in np.eye(len(at))], axis=1)
        weights = 1 / np.sqrt(1 + here**2)  # less for what is far off
        curve = (slopes * weights[:, None]).T @ slopes + np.eye(len(at)) / _SPREAD**2
        down = -(slopes.T @ (weights * here) + (at - start) / _SPREAD**2)
        before = least
        while damping < 1e9:
            there = at + np.clip(np.linalg.solve(curve + damping * np.diag(np.diag(curve)), down), -1, 1)
            seen = misses(there)
            cost = _cost(seen, there, start)
            if cost < least:
                at, here, least, damping = there, seen, cost, damping / 5
                break
            damping *= 5
        if before - least <= _STOP * before:
            break
    return at


def _cost(misses: Floats, at: Floats, start: Floats) -> float:
    return float(np.sum(np.sqrt(1 + misses**2) - 1) + 0.5 * np.sum(((at - start) / _SPREAD) ** 2))
