"""The report: one page that stands alone, of any run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cubeloom.base.errors import UserError
from cubeloom.cli.report import Report
from cubeloom.pipeline import Costs, Kind, Schedule, Sync, generate, synchronised
from cubeloom.train.metrics import Metrics, write_report
from cubeloom.train.metrics.thin import averaged, thinned
from cubeloom.train.metrics.timeline import read_timeline
from pages.data import Page

from .runs import a_run, record, write_timeline


def reported(folder: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """What the page draws, and its curves by name."""
    (run,) = Page(write_report(folder).read_text()).data["runs"]
    return run, {chart["name"]: chart["series"] for chart in run["charts"]}


def facts(run: dict[str, Any]) -> dict[str, str]:
    return {fact["name"]: fact["value"] for fact in run["facts"]}


def test_curves_have_the_points_of_the_steps(tmp_path: Path) -> None:
    records = [record(step, validation=3.0 + step if step in (4, 9) else None, mfu=0.3) for step in range(10)]
    a_run(tmp_path, records)
    _, curves = reported(tmp_path)
    assert list(curves) == ["loss", "gradient-norm", "learning-rate", "tokens", "mfu", "time", "memory"]
    training, validation = curves["loss"]
    assert training["steps"] == list(range(10))
    assert training["values"] == [each.loss for each in records]
    assert (validation["steps"], validation["values"]) == ([4, 9], [7.0, 12.0])
    times = {series["name"]: series["values"][0] for series in curves["time"]}
    assert times == {"computing": 0.06, "exposed communication": 0.01, "bubble": 0.02, "whole step": 0.1}
    assert all(len(curves[name][0]["values"]) == 10 for name in curves)  # tests/pages/test_drawn.py: all are drawn


def test_the_page_tells_of_settings_and_events(tmp_path: Path) -> None:
    job = a_run(tmp_path, [record(0), record(1, skipped="the loss <b>is nan", loss=math.nan)])
    with Metrics(tmp_path, job.metrics, 2) as metrics:
        metrics.event("resume", step=2, restart=1, reason="rank 3 </script><script> was killed")
        metrics.write(record(2))
        metrics.event("checkpoint", step=3)
        metrics.event("done")
    run, curves = reported(tmp_path)
    assert (tmp_path / "settings.toml").read_text() == run["settings"]
    told = {event["name"]: event["fields"] for event in run["events"]}
    assert told["resume"].endswith("restart 1, reason rank 3 </script><script> was killed") and "checkpoint" in told
    assert facts(run)["steps"] == "3 of 10; ended" and facts(run)["MFU"].startswith("unknown: no peak is known")
    marks = [(mark["step"], mark["text"]) for mark in run["charts"][0]["marks"]]
    assert (1, "update skipped: the loss <b>is nan") in marks and (2, "resume") in marks
    assert curves["loss"][0]["values"] == [4.0, None, record(2).loss]


def test_the_page_says_what_was_trained_on_and_for_how_long(tmp_path: Path) -> None:
    a_run(tmp_path, [record(step) for step in range(10)])
    told = facts(reported(tmp_path)[0])
    assert told["model"].startswith("gpt-tiny, 267k parameters, float32")
    assert told["data"] == "random samples"
    assert told["tokens seen"] == "5,120 (512 a step)" and told["time in steps"] == "1 s"


@pytest.mark.parametrize("losses", [[2.0], [math.nan], [math.nan] * 5, [0.0, 0.0], [-3.0, -3.0], [1e30, 1e-30]])
def test_any_curve_can_be_drawn(tmp_path: Path, losses: list[float]) -> None:
    a_run(tmp_path, [record(step, loss=loss, computing_s=None, memory_bytes=None) for step, loss in enumerate(losses)])
    _, curves = reported(tmp_path)
    assert curves["loss"][0]["values"] == [None if math.isnan(loss) else loss for loss in losses]


def test_a_run_that_crashed_before_its_first_step_or_in_a_line(tmp_path: Path) -> None:
    a_run(tmp_path, [])
    run, curves = reported(tmp_path)
    assert not curves and "no end was recorded" in facts(run)["steps"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0, "lo')
    assert "lines that could not be read" in facts(reported(tmp_path)[0])
    (tmp_path / "metrics.jsonl").unlink()
    assert not reported(tmp_path)[1]


def test_a_long_run_has_at_most_a_thousand_points_a_curve(tmp_path: Path) -> None:
    records = [record(step, loss=50.0 if step == 3333 else 2.0) for step in range(5000)]
    a_run(tmp_path, records, steps=5000)
    _, curves = reported(tmp_path)
    for series in (each for chart in curves.values() for each in chart):
        assert len(series["steps"]) <= 1000
        assert series["steps"] == sorted(series["steps"])
    assert 50.0 in curves["loss"][0]["values"]


def test_thin_curves_keep_ends_spikes_and_what_is_no_number() -> None:
    points = [(step, math.sin(step / 50)) for step in range(4000)]
    points[1700], points[2900] = (1700, 9.0), (2900, -9.0)
    points[3100] = (3100, math.nan)
    thin = thinned(points, 100)
    assert len(thin) <= 100 and thin == sorted(thin)
    assert {points[0], points[-1], points[1700], points[2900], points[3100]} <= set(thin)
    assert thinned(points[:100], 100) == points[:100]


def test_means_add_up() -> None:
    columns = [(step, [1.0 * step, 2.0 * step, 3.0 * step]) for step in range(2500)]
    means = averaged(columns, 100)
    assert len(means) == 100
    assert all(first + second == pytest.approx(whole) for _, (first, second, whole) in means)
    assert sum(values[0] for _, values in means) / 100 == pytest.approx(2499 / 2)


@pytest.mark.parametrize(
    "family, mode", [("1f1b", None), ("chimera", None), ("chimera", "halving"), ("chimera-zb", None)]
)
def test_both_timelines_have_the_same_actions_and_colours(tmp_path: Path, family: str, mode: Any) -> None:
    schedule = generate(family, 4, 4, mode=mode) if mode else generate(family, 4, 4)
    a_run(tmp_path, [record(0)])
    write_timeline(tmp_path, schedule, Costs.like(schedule, 0.010, 0.012, 0.008, message=0.004))
    run, _ = reported(tmp_path)
    measured, simulated = run["step"]["timelines"]
    assert "measured" in measured["name"] and "simulated" in simulated["name"]
    look = ("name", "kind", "replica")  # what a page colours them by
    above, below = ([[a[key] for key in look] for a in each["actions"]] for each in (measured, simulated))
    assert above == below
    assert [name for name, *_ in above] == [str(action) for _, action in schedule.actions]


def test_the_simulated_step_takes_the_medians_of_the_measured_one(tmp_path: Path) -> None:
    schedule = generate("1f1b", 2, 4)
    a_run(tmp_path, [record(0)])
    costs = Costs((0.010, 0.020), (0.006, 0.010), (0.010, 0.014))
    write_timeline(tmp_path, schedule, costs)
    file = tmp_path / "timeline.json"
    content = json.loads(file.read_text())
    # One forward and one backward that were much slower than the others do not matter.
    content["workers"][0][0]["end"] += 0.5
    content["workers"][1][-1]["end"] += 0.5
    file.write_text(json.dumps(content))
    found = read_timeline(file)
    assert found.step == 3
    assert found.simulated.costs.forward == pytest.approx([10, 20])
    backward = [i + w for i, w in zip(found.simulated.costs.input_grad, found.simulated.costs.weight_grad, strict=True)]
    assert backward == pytest.approx([16, 24])
    assert found.measured.makespan > 500 > found.simulated.makespan
    first = found.measured.spans[0][0]
    assert (first.start, first.end) == pytest.approx((1, 511))


def test_launches_need_no_time_in_the_file(tmp_path: Path) -> None:
    schedule = synchronised(generate("chimera", 4, 4), Sync.EAGER)
    a_run(tmp_path, [record(0)])
    write_timeline(tmp_path, schedule, Costs.like(schedule))
    file = tmp_path / "timeline.json"
    content = json.loads(file.read_text())
    content["workers"] = [[each for each in row if "R" not in each["action"]] for row in content["workers"]]
    file.write_text(json.dumps(content))
    spans = [span for row in read_timeline(file).measured.spans for span in row]
    launches = [span for span in spans if span.action.kind is Kind.REDUCE]
    assert launches and all(span.start == span.end > 0 for span in launches)


def broken(schedule: Schedule) -> dict[str, Any]:
    row = [[{"action": str(action), "start": 0.0, "end": 1.0} for action in row] for row in schedule.workers]
    whole = {"step": 1, "schedule": str(schedule), "workers": row, "unit": "s"}
    return {
        "no time of 0F0": {**whole, "workers": [row[0][1:], row[1]]},
        "its row of the schedule has not": {**whole, "workers": [row[1], row[0]]},
        "times of 1 workers": {**whole, "workers": row[:1]},
        "times in 'ms'": {**whole, "unit": "ms"},
        "goes from 2": {**whole, "workers": [[{"action": "0F0", "start": 2.0, "end": 1.0}, *row[0][1:]], row[1]]},
        "not the timeline of a step": {"step": 1},
        "not an action": {**whole, "workers": [[{"action": "x", "start": 0, "end": 1}], row[1]]},
    }


@pytest.mark.parametrize("words", broken(generate("1f1b", 2, 2)))
def test_a_broken_timeline_is_said_and_the_rest_is_reported(tmp_path: Path, words: str) -> None:
    a_run(tmp_path, [record(0), record(1)])
    (tmp_path / "timeline.json").write_text(json.dumps(broken(generate("1f1b", 2, 2))[words]))
    run, curves = reported(tmp_path)
    assert words in run["step"]["why"] and curves["loss"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        write_report(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"is not the folder of a run: it has no settings.toml"):
        write_report(tmp_path)
    (tmp_path / "settings.toml").write_text("colour = 'red'\n")
    with pytest.raises(UserError, match="unknown setting colour"):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.toml"]


def test_the_command_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "run", [record(0)])
    file = tmp_path / "page.html"
    assert Report(folder=tmp_path / "run", output=file, json=True)() == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["report"] == str(file) and said["last"] == record(0).as_json() and file.exists()
    assert Report(folder=tmp_path / "run")() == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    with pytest.raises(UserError, match="cannot write"):
        Report(folder=tmp_path / "run", output=tmp_path / "no" / "page.html")()
