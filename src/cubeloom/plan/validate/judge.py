"""How good predictions are: how far off, whether in the right order, and what following them would lose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from cubeloom.plan.hardware.uncertainty import NINETY
from cubeloom.plan.validate.table import Floats


@dataclass(frozen=True)
class Verdict:
    """All as fractions."""

    runs: int
    mape: float  # mean of |predicted / measured - 1|
    p95: float  # 95 of 100 runs are no further off
    tau: float | None  # Kendall's: 1 if all pairs are in order, -1 if none is; None where there is no pair
    regret: (
        float | None
    )  # how much slower the run predicted to be fastest is than the fastest, in the mean over all work
    coverage: float  # the share of runs inside their 90 % interval
    median_ratio: float  # of predicted to measured
    regrets: dict[str, float]  # the same by work: what was run at least twice


def judge(
    predicted: Floats, measured: Floats, errors: Floats, work: Sequence[Hashable], names: Sequence[str]
) -> Verdict:
    """`errors` are standard deviations of the predictions, as shares."""
    ratio = predicted / measured
    off = np.abs(ratio - 1)
    lost = regrets(predicted, measured, work, names)
    return Verdict(
        runs=len(off),
        mape=float(off.mean()),
        p95=float(np.quantile(off, 0.95)),
        tau=kendall_tau(predicted, measured),
        regret=float(np.mean(list(lost.values()))) if lost else None,
        coverage=float(np.mean(inside(predicted, measured, errors))),
        median_ratio=float(np.median(ratio)),
        regrets=lost,
    )


def inside(predicted: Floats, measured: Floats, errors: Floats) -> Floats:
    """Whether each run lies in its interval: a factor to either side, as times are positive."""
    return np.asarray(np.abs(np.log(measured / predicted)) <= NINETY * errors)


def kendall_tau(predicted: Floats, measured: Floats) -> float | None:
    """Pairs in the same order less pairs in the other, over all pairs that were measured to differ."""
    agreement = pairs = 0.0
    for i in range(1, len(measured)):
        truth = np.sign(measured[i] - measured[:i])
        agreement += float(np.sum(truth * np.sign(predicted[i] - predicted[:i])))
        pairs += float(np.sum(np.abs(truth)))
    return agreement / pairs if pairs else None


def regrets(predicted: Floats, measured: Floats, work: Sequence[Hashable], names: Sequence[str]) -> dict[str, float]:
    """For the same work on the same machine: the time of the run one would choose, over the best, less 1."""
    by_work: dict[Hashable, list[int]] = defaultdict(list)
    for row, each in enumerate(work):
        by_work[each].append(row)
    found = {}
    for rows in by_work.values():
        if len(rows) > 1:
            chosen = min(rows, key=lambda row: predicted[row])
            name = names[rows[0]]
            while name in found:  # other work of the same title, such as in another precision
                name += ", again"
            found[name] = float(measured[chosen] / min(measured[row] for row in rows) - 1)
    return found
