"""Fit on some runs, predict others: the figures that are promised, the fit, the measures, and what is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cubeloom.base.errors import UserError
from cubeloom.cli.validate import Validate
from cubeloom.plan.hardware import cluster
from cubeloom.plan.validate import Constants, Runs, fit, judge, read_runs, read_times, step_seconds
from cubeloom.plan.validate.fit import descend, moved_by
from cubeloom.plan.validate.judge import kendall_tau
from cubeloom.plan.validate.table import COLUMNS, TIME, Floats

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "vtrain"
needs_data = pytest.mark.skipif(not DATA.exists(), reason=f"no measured data at {DATA}")
START = cluster("dgx-a100")


def some(runs: Runs, which: NDArray[np.bool_]) -> Runs:
    return Runs(**{field.name: getattr(runs, field.name)[which] for field in fields(Runs)})


def a_third(count: int, seed: int) -> NDArray[np.bool_]:
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng(seed).permutation(count)[: count // 3]] = True
    return chosen


# A few runs with everything in them: tensor, data and pipe axes, one node and several, small and large micro-batches.
HEADER = [*COLUMNS.values(), TIME]
ROWS = [
    (8, 64, 2, 1024, 16, 24, 1024, 2, 2, 2),
    (8, 64, 8, 2048, 16, 24, 1024, 1, 8, 1),
    (8, 64, 4, 2048, 16, 24, 1024, 8, 1, 1),
    (8, 64, 8, 2048, 16, 24, 1024, 1, 2, 4),
    (64, 512, 4, 3072, 32, 30, 2048, 1, 64, 1),
    (64, 512, 4, 3072, 32, 30, 2048, 8, 4, 2),
]


def written(path: Path, rows: list[tuple[object, ...]], header: list[str] = HEADER) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return written(tmp_path / "runs.csv", [(*row, 1000.0 + i) for i, row in enumerate(ROWS)])


# --- the promise ---


@needs_data
@pytest.mark.parametrize(("name", "most"), [("a100_single_node.csv", 0.08), ("a100_multi_node.csv", 0.12)])
@pytest.mark.parametrize("seed", range(10))
def test_fitted_on_a_third_and_judged_on_the_rest(name: str, most: float, seed: int) -> None:
    runs, seconds = read_runs(DATA / name), read_times(DATA / name)
    third = a_third(len(runs), seed)
    constants = fit(some(runs, third), seconds[third], START)
    predicted = step_seconds(constants, some(runs, ~third))  # of runs, which have no times
    verdict = judge(predicted, seconds[~third], some(runs, ~third))
    assert verdict.mape <= most
    assert verdict.tau is not None
    assert verdict.tau > 0.7
    assert verdict.regret < 0.1


# --- the closed form ---


def test_a_step_follows_its_parts(table: Path) -> None:
    """Each constant, made worse, makes every run slower that uses it, and no other."""
    runs, constants = read_runs(table), Constants(START)
    before = step_seconds(constants, runs)

    def slower(cluster: object = START, **others: float) -> list[bool]:
        after = step_seconds(replace(constants, cluster=cluster, **others), runs)  # type: ignore[arg-type]
        assert (after >= before).all()
        return (after > before * (1 + 1e-9)).tolist()

    several = [row[0] > 8 for row in ROWS]
    assert all(slower(passes=100.0))
    assert all(slower(optimizer_bytes=100.0))
    assert all(slower(replace(START, device=replace(START.device, matmul_fraction=0.4))))
    assert all(slower(replace(START, device=replace(START.device, host=1e-4))))
    assert all(slower(replace(START, link_bandwidth=1e10, pair_bandwidth=1e10)))
    assert slower(replace(START, nic_bandwidth=1e9)) == several


def test_more_microbatches_shrink_the_bubble(table: Path) -> None:
    runs = some(read_runs(table), np.array([False, False, False, True, False, False]))  # four stages
    twice = replace(runs, batch=2 * runs.batch)
    ratio = step_seconds(Constants(START), twice) / step_seconds(Constants(START), runs)
    assert 1.3 < ratio.item() < 2


# --- the fit ---


def many_runs() -> Runs:
    random = np.random.default_rng(0)
    rows = np.array(ROWS, float)[random.integers(0, len(ROWS), 300)]
    rows[:, 1] *= random.integers(1, 5, 300)  # batches
    rows[:, 5] *= random.integers(1, 4, 300)  # layers
    return Runs(*rows.T)


def test_constants_are_found_again() -> None:
    """From times that the closed form made, with many runs: those constants that the runs depend on come back."""
    runs = many_runs()
    truth = moved_by(Constants(START), np.array([-0.3, 0.8, -0.4, -0.5, 0.6, 0.4, 0.3]))
    found = fit(runs, step_seconds(truth, runs), START)
    assert found.cluster.device.matmul_fraction == pytest.approx(truth.cluster.device.matmul_fraction, rel=0.05)
    assert found.passes == pytest.approx(truth.passes, rel=0.1)
    assert np.abs(step_seconds(found, runs) / step_seconds(truth, runs) - 1).max() < 0.02


def test_stragglers_do_not_bend_the_fit() -> None:
    runs = many_runs()
    seconds = step_seconds(Constants(START), runs)
    late = np.arange(300) % 10 == 0
    off = step_seconds(fit(runs, np.where(late, 5 * seconds, seconds), START), runs) / seconds - 1
    assert np.abs(off).max() < 0.05


def test_the_way_down_reaches_the_bottom() -> None:
    """A straight line through many points far outweighs where the search began."""
    x = np.linspace(0, 1, 400)

    def misses(at: Floats) -> Floats:
        return 20 * (at[0] + at[1] * x - (2 + 3 * x))

    assert descend(misses, np.zeros(2)) == pytest.approx([2, 3], abs=0.1)


# --- the measures ---


def test_the_measures(table: Path) -> None:
    runs = read_runs(table)
    measured = np.array([1.0, 2.0, 4.0, 3.0, 10.0, 5.0])
    verdict = judge(measured * np.array([1.1, 0.9, 1, 1, 1, 1]), measured, runs)
    assert verdict.mape == pytest.approx(0.2 / 6)
    assert 0.0 < verdict.p95 <= 0.1 + 1e-9
    assert verdict.tau == 1.0
    assert len(verdict.regrets) == 3
    assert verdict.regret == 0.0
    # The second of three runs of the same work is now chosen over the fourth, and the slower of the last two.
    chosen = judge(np.array([1.0, 9.0, 1.0, 3.0, 1.0, 5.0]), measured, runs)
    assert chosen.regret == pytest.approx((0 + (4 / 2 - 1) + (10 / 5 - 1)) / 3)


def test_kendalls_tau() -> None:
    rising = np.array([1.0, 2.0, 3.0, 4.0])
    assert kendall_tau(rising, rising) == 1.0
    assert kendall_tau(-rising, rising) == -1.0
    assert kendall_tau(np.array([1.0, 3.0, 2.0, 4.0]), rising) == pytest.approx(4 / 6)  # one pair of six is wrong
    assert kendall_tau(rising[:1], rising[:1]) is None
    assert kendall_tau(rising, np.ones(4)) is None


# --- the command ---


def test_predictions_cannot_depend_on_the_times_judged(table: Path, tmp_path: Path) -> None:
    """Runs are read alike from a file without times, and from one with other times."""
    bare = written(tmp_path / "bare.csv", list(ROWS), HEADER[:-1])
    garbled = written(tmp_path / "garbled.csv", [(*row, "soon") for row in ROWS])
    assert TIME not in {field.name for field in fields(Runs)}
    for field in fields(Runs):
        expected = getattr(read_runs(table), field.name).tolist()
        assert (
            getattr(read_runs(bare), field.name).tolist()
            == getattr(read_runs(garbled), field.name).tolist()
            == expected
        )


def test_the_command(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Validate(fit=table, judge=table, json=True)() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"mape", "p95", "tau", "regret"} <= set(found)
    assert 0 <= found["mape"] <= found["p95"]
    assert -1 <= found["tau"] <= 1
    assert found["runs"] == len(ROWS)
    assert Validate(fit=table, judge=table)() == 0
    assert "Kendall tau" in capsys.readouterr().out


def refused(judged: Path, fitted: Path | None = None) -> str:
    with pytest.raises(UserError) as raised:
        Validate(fit=fitted or judged, judge=judged)()
    return str(raised.value)


def test_what_cannot_be_read_is_refused(tmp_path: Path, table: Path) -> None:
    path = tmp_path / "wrong.csv"
    assert f"no file {path}" in refused(path)
    assert f"no file {path}" in refused(table, path)
    assert "cannot be read" in refused(tmp_path)
    path.write_text("")
    assert "has no column '# GPUs'; its columns are none" in refused(path)
    written(path, [])
    assert "has no rows" in refused(path)
    written(path, [row[1:] for row in ROWS], HEADER[1:])
    assert "has no column '# GPUs'" in refused(path)
    written(path, list(ROWS), HEADER[:-1])
    assert "has no column 'iteration time (ms)'" in refused(path)
    assert "has no column 'iteration time (ms)'" in refused(path, table)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (3, "wide", "row 2: hidden size = 'wide' is not a number"),
        (3, "", "row 2: hidden size = '' is not a number"),
        (3, "nan", "row 2: hidden size = 'nan' should be a finite number above 0"),
        (2, "0", "row 2: micro batch = '0' should be a finite number above 0"),
        (10, "later", "row 2: iteration time (ms) = 'later' is not a number"),
        (0, "16", "row 2: its parallelisms do not multiply to its # GPUs"),
        (1, "63", "row 2: its global batch is not made of whole micro-batches"),
    ],
)
def test_a_wrong_cell_is_refused(tmp_path: Path, column: int, value: str, message: str) -> None:
    rows: list[list[object]] = [[*row, 1000.0] for row in ROWS]
    rows[1][column] = value
    assert message in refused(written(tmp_path / "wrong.csv", [tuple(row) for row in rows]))


def test_a_short_row_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "wrong.csv", [(*ROWS[0], 1000.0), ROWS[1][:4]])
    assert "row 2: attention heads = None is not a number" in refused(path)


def test_an_unknown_cluster_is_refused(table: Path) -> None:
    with pytest.raises(UserError, match="did you mean dgx-a100"):
        Validate(fit=table, judge=table, cluster="dgx-a10")()
