"""`cubeloom validate`: hold the planner against measured training steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from cubeloom.plan.hardware import cluster
from cubeloom.plan.validate import Report, validate


@dataclass(frozen=True, kw_only=True)
class Validate:
    """Predict measured training steps as `cubeloom plan` does, and say how far off that is.

    The files are CSV, with the columns that vTrain publishes or with those of docs/validate.md. The times of the judged file
    are read only when all is predicted.
    """

    judge: Path
    """Steps to predict."""
    fit: Path | None = None
    """Steps to fit three constants on: how fast products, memory and the network are. Without it nothing is fitted."""
    cluster: str | None = None
    """The machine that all steps ran on: a name, or a TOML file. By default each row's own device says it."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        machine = None if self.cluster is None else cluster(self.cluster)
        report = validate(self.judge, self.fit, machine)
        console = Console(stderr=self.json)
        if self.fit is not None:
            console.print(words_of_constants(report))
        if report.verdict.regrets:
            console.print(regrets_table(report))
        for title, counts in (("not predicted", report.skipped), ("not said, taken as", report.assumed)):
            if counts:
                console.print(f"{title}: " + "; ".join(f"{count} × {what}" for what, count in counts.items()))
        console.print(words(report))
        if self.json:
            print(json.dumps(report.as_json()))
        return 0


def words_of_constants(report: Report) -> str:
    c = report.constants
    return (
        f"fitted, times what the files of devices and clusters say: products {c.products:.2f}, "
        f"memory and host {c.memory:.2f}, network {c.network:.2f}"
    )


def regrets_table(report: Report, most: int = 10) -> Table:
    """The work on which the choice of the predicted best loses most."""
    table = Table("work", "regret", title="What the choice of the predicted best loses")
    worst = sorted(report.verdict.regrets.items(), key=lambda each: -each[1])
    for name, regret in worst[:most]:
        table.add_row(name, f"{regret:.1%}")
    if len(worst) > most:
        table.add_row(f"{len(worst) - most} more, none worse", "")
    return table


def words(report: Report) -> str:
    v = report.verdict
    order = "there is no pair to order" if v.tau is None else f"Kendall tau {v.tau:.3f}"
    regret = "nothing was run in two ways" if v.regret is None else f"regret {v.regret:.1%} in the mean"
    return (
        f"{v.runs} runs: off by {v.mape:.1%} in the mean, 95 of 100 by at most {v.p95:.1%}; predicted over measured "
        f"{v.median_ratio:.2f} in the median; {v.coverage:.0%} inside their 90 % interval; {order}; {regret}"
    )
