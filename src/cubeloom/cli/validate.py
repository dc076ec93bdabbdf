"""`cubeloom validate`: fit the constants of the closed form on measured steps, and judge its predictions of others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from cubeloom.plan import validate
from cubeloom.plan.hardware import cluster
from cubeloom.plan.validate import Constants, Verdict


@dataclass(frozen=True, kw_only=True)
class Validate:
    """Fit the constants of a device and cluster on the step times of one file, and judge the predictions of another's.

    The files are CSV with the columns that vTrain publishes. The times of the second are read only when all is predicted.
    """

    fit: Path
    """Steps to fit on."""
    judge: Path
    """Steps to predict."""
    cluster: str = "dgx-a100"
    """Where the fit starts: a name, or a TOML file."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        start = Constants(cluster(self.cluster))
        asked = validate.read_runs(self.judge)  # holds no times
        fitted = validate.fit(validate.read_runs(self.fit), validate.read_times(self.fit), start.cluster)
        predicted = validate.step_seconds(fitted, asked)
        verdict = validate.judge(predicted, validate.read_times(self.judge), asked)

        console = Console(stderr=self.json)
        console.print(constants_table(start, fitted), regrets_table(verdict), words(verdict), sep="\n")
        if self.json:
            print(json.dumps({**verdict.as_json(), "constants": as_json(fitted)}))
        return 0


def as_json(constants: Constants) -> dict[str, Any]:
    machine = constants.cluster
    return {
        "matmul_fraction": machine.device.matmul_fraction,
        "host": machine.device.host,
        "link_bandwidth": machine.link_bandwidth,
        "nic_bandwidth": machine.nic_bandwidth,
        "start": machine.start,
        "passes": constants.passes,
        "optimizer_bytes": constants.optimizer_bytes,
    }


def constants_table(start: Constants, fitted: Constants) -> Table:
    table = Table("constant", start.cluster.name, "fitted", title="Constants")
    before, after = as_json(start), as_json(fitted)
    for name in before:
        table.add_row(name, f"{before[name]:.3g}", f"{after[name]:.3g}")
    return table


def regrets_table(verdict: Verdict, most: int = 10) -> Table:
    """The work on which the choice of the predicted best loses most."""
    table = Table("work", "regret", title="What the choice of the predicted best loses")
    worst = sorted(verdict.regrets.items(), key=lambda each: -each[1])
    for name, regret in worst[:most]:
        table.add_row(name, f"{regret:.1%}")
    if len(worst) > most:
        table.add_row(f"{len(worst) - most} more, none worse", "")
    return table


def words(verdict: Verdict) -> str:
    order = "there is no pair to order" if verdict.tau is None else f"Kendall tau {verdict.tau:.3f}"
    return (
        f"{verdict.runs} runs: off by {verdict.mape:.1%} in the mean, 95 of 100 by at most {verdict.p95:.1%}; "
        f"{order}; regret {verdict.regret:.1%} in the mean"
    )
