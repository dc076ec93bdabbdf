"""How far off the planner is on published steps: before any fit, and after three constants were fitted on half of the groups.

    python bench/validate.py ../shared/data

A group has the same model, devices and tensor parallelism; groups are drawn with a fixed seed. The last line is of the
interval: chosen so that 90 % of the steps of half of the groups of each file lie inside, it holds how many of the others.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cubeloom.base.errors import UserError
from cubeloom.plan.hardware.uncertainty import NINETY
from cubeloom.plan.validate import Constants, Run, Verdict, fit, judge, measured, predict, read_rows

LEAST_GROUPS = 4  # of a file on which constants are fitted


@dataclass(frozen=True)
class Steps:
    name: str
    runs: list[Run]
    times: NDArray[np.float64]

    def half(self) -> NDArray[np.bool_]:
        groups = [str((run.sizes, run.devices, run.tensor)) for run in self.runs]
        order = np.random.default_rng(0).permutation(sorted(set(groups)))
        chosen = set(order[: len(order) // 2].tolist())
        return np.array([group in chosen for group in groups])

    def some(self, which: NDArray[np.bool_]) -> Steps:
        return Steps(self.name, [run for run, its in zip(self.runs, which, strict=True) if its], self.times[which])

    def verdict(self, constants: Constants) -> Verdict:
        predicted = predict([replace(run, cluster=constants.on(run.cluster)) for run in self.runs])
        errors = [each.error if constants.error is None else constants.error for each in predicted]
        work = [run.work for run in self.runs]
        seconds = np.array([each.seconds for each in predicted])
        return judge(seconds, self.times, np.array(errors), work, [str(each) for each in work])

    def misses(self) -> NDArray[np.float64]:
        return np.abs(np.log(np.array([each.seconds for each in predict(self.runs)]) / self.times))


def steps_of(folder: Path) -> list[Steps]:
    found = []
    for path in sorted(folder.glob("*/*.csv")):
        try:
            runs, times, _ = measured(read_rows(path), str(path))
        except UserError:
            continue  # no table of steps
        if runs:
            found.append(Steps(path.stem, runs, times))
    return found


def shown(value: float | None, form: str = ".1%") -> str:
    return "-" if value is None else format(value, form)


def row(steps: Steps) -> list[str]:
    before = steps.verdict(Constants())
    cells = [steps.name, str(before.runs), shown(before.mape), shown(before.tau, ".2f"), shown(before.regret)]
    cells += [shown(before.median_ratio, ".2f"), shown(before.coverage, ".0%")]
    half = steps.half()
    if len({str((run.sizes, run.devices, run.tensor)) for run in steps.runs}) < LEAST_GROUPS:
        return [*cells, "-", "-", "-"]
    constants = fit(steps.some(half).runs, steps.times[half])
    after = steps.some(~half).verdict(constants)
    factors = f"{constants.products:.2f} {constants.memory:.2f} {constants.network:.2f}"
    return [*cells, f"{shown(after.mape)} of {after.runs}", shown(after.median_ratio, ".2f"), factors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    found = steps_of(parser.parse_args().folder)
    columns = ["set", "runs", "MAPE", "tau", "regret", "ratio", "in 90 %", "fitted: MAPE", "ratio", "constants"]
    table = Table(*columns)
    for steps in found:
        table.add_row(*row(steps))
    console = Console(width=140)
    console.print(table)
    known = np.concatenate([steps.some(steps.half()).misses() for steps in found])
    others = np.concatenate([steps.some(~steps.half()).misses() for steps in found])
    width = float(np.quantile(known, 0.9))
    console.print(
        f"an interval of {width / NINETY:.3f} standard deviations' width holds 90 % of half of the groups, and "
        f"{np.mean(others <= width):.0%} of the others"
    )


if __name__ == "__main__":
    main()
