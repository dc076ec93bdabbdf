"""How good predictions are: how far off, whether in the right order, and what following them would lose."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubeloom.plan.validate.table import Floats, Runs


@dataclass(frozen=True)
class Verdict:
    """All as fractions."""

    mape: float  # mean of |predicted / measured - 1|
    p95: float  # 95 of 100 runs are no further off
    tau: float | None  # Kendall's: 1 if all pairs are in order, -1 if none is; None where there is no pair
    regrets: dict[str, float]  # by work: how much slower the run predicted to be fastest is than the fastest
    runs: int

    @property
    def regret(self) -> float:
        """The mean over all work."""
        return float(np.mean(list(self.regrets.values())))

    def as_json(self) -> dict[str, Any]:
        return {
            "mape": self.mape,
            "p95": self.p95,
            "tau": self.tau,
            "regret": self.regret,
            "regrets": self.regrets,
            "runs": self.runs,
        }


def judge(predicted: Floats, measured: Floats, runs: Runs) -> Verdict:
    off = np.abs(predicted / measured - 1)
    return Verdict(
        mape=float(off.mean()),
        p95=float(np.quantile(off, 0.95)),
        tau=kendall_tau(predicted, measured),
        regrets=regrets(predicted, measured, runs),
        runs=len(off),
    )


def kendall_tau(predicted: Floats, measured: Floats) -> float | None:
    """Pairs in the same order less pairs in the other, over all pairs that were measured to differ."""
    agreement = pairs = 0.0
    for i in range(1, len(measured)):
        truth = np.sign(measured[i] - measured[:i])
        agreement += float(np.sum(truth * np.sign(predicted[i] - predicted[:i])))
        pairs += float(np.sum(np.abs(truth)))
    return agreement / pairs if pairs else None


def regrets(predicted: Floats, measured: Floats, runs: Runs) -> dict[str, float]:
    """For each model, batch and number of devices: the time of the run one would choose, over the best, less 1."""
    by_work: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for row, work in enumerate(runs.work()):
        by_work[work].append(row)
    found = {}
    for (hidden, _, layers, sequence, batch, devices), rows in sorted(by_work.items()):
        chosen = min(rows, key=lambda row: predicted[row])
        best = min(measured[row] for row in rows)
        name = f"{layers:g}x{hidden:g}, {batch:g}x{sequence:g} tokens, {devices:g} devices"
        found[name] = float(measured[chosen] / best - 1)
    return found
