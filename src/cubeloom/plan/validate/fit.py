"""Three constants from measured steps: how fast products, memory and the host, and the network are, over what the files say.

Constants are positive and known to a factor at best, so that their logarithms are fitted. One that moves by `_SPREAD` costs
as much as a run that is `_NOISE` off, and none leaves its bounds: few runs do not lead far from the files, many do. A run that
is far off counts by the logarithm of its distance, not its square, so that stragglers do not bend the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cubeloom.plan.hardware import Cluster
from cubeloom.plan.validate.predict import predict
from cubeloom.plan.validate.table import Floats, Run

MOST_RUNS = 240  # that are fitted on, evenly from all
_SPREAD = 0.2
_NOISE = 0.06
# Products cannot be faster than the peak; what is recalled or estimated is right to within a half.
_LEAST, _MOST = np.log([0.67, 0.67, 0.67]), np.log([1.17, 1.5, 1.5])
_ROUNDS = 6
_SLIGHT = 0.02  # for derivatives: a time that follows from waves has steps
_STOP = 1e-3  # of the cost
_LEAST_ERROR = 0.05


@dataclass(frozen=True)
class Constants:
    """Factors on what the files of devices and clusters say."""

    products: float = 1.0
    memory: float = 1.0  # operators that only read and write, their launch, and the host
    network: float = 1.0
    error: float | None = None  # one standard deviation of the runs that they were fitted on

    def on(self, cluster: Cluster) -> Cluster:
        device = cluster.device
        made = replace(
            device,
            matmul_fraction=device.matmul_fraction * self.products,
            fp8_fraction=device.fp8_fraction * self.products,
            attention_forward=device.attention_forward * self.products,
            attention_backward=device.attention_backward * self.products,
            bandwidth_fraction=device.bandwidth_fraction * self.memory,
            launch=device.launch / self.memory,
            host=device.host / self.memory,
        )
        return replace(
            cluster,
            device=made,
            link_bandwidth=cluster.link_bandwidth * self.network,
            pair_bandwidth=cluster.pair_bandwidth * self.network,
            nic_bandwidth=cluster.nic_bandwidth * self.network,
            start=cluster.start / self.network,
        )


def fit(runs: Sequence[Run], seconds: Floats) -> Constants:
    """The constants under which these runs take about these times."""
    chosen = np.unique(np.linspace(0, len(runs) - 1, min(len(runs), MOST_RUNS)).round().astype(int))
    some = [runs[place] for place in chosen]

    def predicted(made: Constants) -> Floats:
        found = predict([replace(run, cluster=made.on(run.cluster)) for run in some])
        return np.array([each.seconds for each in found])

    return fitted(predicted, seconds[chosen])


def fitted(
    predicted: Callable[[Constants], Floats], seconds: Floats, least: Floats = _LEAST, most: Floats = _MOST
) -> Constants:
    """The constants between these bounds, as logarithms, under which what is predicted is about these times."""

    def off(moved: Floats) -> Floats:
        return np.asarray(np.log(predicted(moved_by(moved)) / seconds))

    at = descend(lambda moved: off(moved) / _NOISE, np.zeros(3), least, most)
    left = float(np.quantile(np.abs(off(at)), 0.9)) / 1.645
    return replace(moved_by(at), error=max(_LEAST_ERROR, left))


def moved_by(moved: Floats) -> Constants:
    products, memory, network = np.exp(moved).tolist()
    return Constants(products, memory, network)


def descend(
    misses: Callable[[Floats], Floats], start: Floats, least_of: Floats = _LEAST, most_of: Floats = _MOST
) -> Floats:
    """Levenberg and Marquardt's way down: Gauss-Newton steps, shortened until they help, that stay inside the bounds."""
    at, damping = start, 1e-2
    here = misses(at)
    least = _cost(here, at, start)
    for _ in range(_ROUNDS):
        slopes = np.stack([(misses(at + _SLIGHT * way) - here) / _SLIGHT for way in np.eye(len(at))], axis=1)
        weights = 1 / (1 + here**2)  # less for what is far off
        curve = (slopes * weights[:, None]).T @ slopes + np.eye(len(at)) / _SPREAD**2
        down = -(slopes.T @ (weights * here) + (at - start) / _SPREAD**2)
        before = least
        while damping < 1e4:
            step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), down)
            there = np.clip(at + step, least_of, most_of)
            seen = misses(there)
            cost = _cost(seen, there, start)
            if cost < least:
                at, here, least, damping = there, seen, cost, damping / 5
                break
            damping *= 10
        if before - least <= _STOP * before:
            break
    return at


def _cost(misses: Floats, at: Floats, start: Floats) -> float:
    return float(0.5 * np.sum(np.log1p(misses**2)) + 0.5 * np.sum(((at - start) / _SPREAD) ** 2))
