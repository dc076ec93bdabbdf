"""`cubeloom reproduce`: simulates a paper's experiments on its cluster, and shows our figures beside the published
ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from cubeloom.base.errors import UserError
from cubeloom.base.files import write_asked
from cubeloom.plan.reproduce import Paper, Report, Row, page, reproduce


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Simulate the experiments of a paper on its cluster: our figures beside the published ones, with the differences.

    Rows that were used for calibration are marked; all others are predictions.
    """

    paper: tyro.conf.Positional[Paper]
    """cube (Bian et al., Frontera and Longhorn), chimera (Li and Hoefler, Piz Daint) or tensor3d (Singh et al., Perlmutter)."""
    html: Path | None = None
    """Write a page: published and simulated figures, and where the simulated time goes."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        if self.html is not None and not self.html.parent.is_dir():
            raise UserError(f"no folder {self.html.parent} to write {self.html.name} in")
        report = reproduce(self.paper)
        if self.html is not None:
            write_asked(self.html, page(report))
        console = Console(stderr=self.json)
        console.print(rows_table(report), seconds_table(report), sep="\n")
        for line in report.words:
            console.print(line, highlight=False, soft_wrap=True)
        if self.json:
            print(json.dumps(report.as_json()))
        return 0


def rows_table(report: Report) -> Table:
    table = Table(title=report.title, box=None, pad_edge=False)
    table.add_column("figure")
    for name in ("published", "ours", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("source")
    for row in report.rows:
        table.add_row(row.point.name, _number(row.point.value), _number(row.ours), _difference(row), row.point.source)
    return table


def seconds_table(report: Report) -> Table:
    """Where the time of our runs goes."""
    kinds = list(dict.fromkeys(kind for share in report.shares for kind in share.seconds))
    table = Table(title="Simulated seconds", box=None, pad_edge=False)
    table.add_column("run")
    for name in (*kinds, "in all"):
        table.add_column(name, justify="right")
    for share in report.shares:
        table.add_row(share.name, *(f"{share.seconds.get(kind, 0.0):.3f}" for kind in kinds), f"{share.total:.3f}")
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _difference(row: Row) -> str:
    if row.calibrated:
        return "calibrated"
    return f"{row.difference:+.1%}" if row.point.value else ("as published" if not row.ours else "differs")
