"""From files of measured steps to a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cubeloom.base.errors import UserError
from cubeloom.plan.cost_model.recompute import RECOMPUTE
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.validate.fit import Constants, fit
from cubeloom.plan.validate.judge import Verdict, judge
from cubeloom.plan.validate.predict import Prediction, predict
from cubeloom.plan.validate.runs import run_of
from cubeloom.plan.validate.table import Floats, Row, Run, Skipped, read_rows, seconds_of, without_times

NO_TIME = "no measured seconds or tokens/s"


@dataclass(frozen=True)
class Report:
    verdict: Verdict
    constants: Constants
    skipped: dict[str, int]
    runs: tuple[Run, ...]
    predictions: tuple[Prediction, ...]
    times: Floats

    @property
    def assumed(self) -> dict[str, int]:
        """How many runs lack what, and what was taken instead."""
        found: Counter[str] = Counter()
        for run, prediction in zip(self.runs, self.predictions, strict=True):
            for what in run.assumed:
                taken = {
                    "recompute": f"recompute: {RECOMPUTE[prediction.recompute]}",
                    "vocabulary": f"vocabulary: {run.sizes.vocabulary}",
                    "micro_batch": f"micro_batch: {run.microbatch}",
                }
                found[taken[what]] += 1
        return dict(found.most_common())

    def as_json(self) -> dict[str, Any]:
        v = self.verdict
        return {
            "runs": v.runs,
            "mape": v.mape,
            "p95": v.p95,
            "tau": v.tau,
            "regret": v.regret,
            "coverage": v.coverage,
            "median_ratio": v.median_ratio,
            "skipped": self.skipped,
        }


def validate(judged: Path, fitted: Path | None = None, machine: Cluster | None = None) -> Report:
    """Predict the steps of one file, with the planner as it is or fitted on the times of another, and judge that.

    `machine`: the cluster that all runs were on, where the rows' own devices are not meant.
    """
    rows = read_rows(judged)
    constants = Constants()
    if fitted is not None:
        known, seconds, _ = measured(read_rows(fitted), str(fitted), machine)
        if not known:
            raise UserError(f"{fitted} has no row that can be predicted and has a time: there is nothing to fit on")
        constants = fit(known, seconds)
    runs, places, skipped = readable(without_times(rows), str(judged), machine)
    fitted_runs = [replace(run, cluster=constants.on(run.cluster)) for run in runs]
    predictions = predict(fitted_runs)
    if constants.error is not None:
        predictions = [replace(each, error=constants.error) for each in predictions]
    # Everything is predicted: now the times are read.
    took = [seconds_of(rows[place], f"{judged}, row {place + 1}") for place in places]
    timed = [spot for spot, time in enumerate(took) if time is not None]
    if len(timed) < len(took):
        skipped[NO_TIME] += len(took) - len(timed)
    if not timed:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise UserError(f"{judged} has no row that can be judged: {reasons}")
    times = np.array([took[spot] for spot in timed], float)
    some, found = [runs[spot] for spot in timed], [predictions[spot] for spot in timed]
    verdict = judge(
        np.array([each.seconds for each in found]),
        times,
        np.array([each.error for each in found]),
        [run.work for run in some],
        [str(run) for run in some],
    )
    return Report(verdict, constants, dict(skipped.most_common()), tuple(some), tuple(found), times)


def readable(rows: Sequence[Row], where: str, machine: Cluster | None) -> tuple[list[Run], list[int], Counter[str]]:
    """The runs that can be predicted, the places of their rows, and why others cannot."""
    runs, places, skipped = [], [], Counter[str]()
    for place, row in enumerate(rows):
        try:
            run = run_of(row, f"{where}, row {place + 1}")
        except Skipped as reason:
            skipped[str(reason)] += 1
            continue
        if machine is not None:
            run = replace(run, cluster=replace(machine, software=run.cluster.software))
        runs.append(run)
        places.append(place)
    return runs, places, skipped


def measured(rows: Sequence[Row], where: str, machine: Cluster | None = None) -> tuple[list[Run], Floats, Counter[str]]:
    """Runs with their times, for a fit."""
    runs, places, skipped = readable(rows, where, machine)
    times = [seconds_of(rows[place], f"{where}, row {place + 1}") for place in places]
    kept = [spot for spot, time in enumerate(times) if time is not None]
    return [runs[spot] for spot in kept], np.array([times[spot] for spot in kept], float), skipped
