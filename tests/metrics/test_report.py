"""The report: one page that stands alone, of any run."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cubeloom.base.errors import UserError
from cubeloom.cli.report import Report
from cubeloom.pipeline import Costs, Kind, Schedule, Sync, generate, synchronised
from cubeloom.train.metrics import Metrics, write_report
from cubeloom.train.metrics.thin import averaged, thinned
from cubeloom.train.metrics.timeline import read_timeline

from .runs import a_run, record, write_timeline

# Elements that HTML closes by itself.
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and keeps them with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all_text(self, tag: str) -> str:
        return "\n".join(text for inside, text in self.texts if inside == tag)


def reported(folder: Path) -> tuple[str, Page, dict[str, Any]]:
    """The text, its elements, and the curves by name."""
    text = write_report(folder).read_text()
    assert "{{" not in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for attribute in re.findall(r'(?:src|href|url|action)\s*[=(]\s*["\']?([^"\')>]*)', text):
        assert attribute.startswith("#"), f"the page needs {attribute}"
    match = re.search(r"const charts = (.*);\n", text)
    assert match is not None
    return text, Page(text), {chart["name"]: chart["series"] for chart in json.loads(match[1])}


def test_curves_have_the_points_of_the_steps(tmp_path: Path) -> None:
    records = [record(step, validation=3.0 + step if step in (4, 9) else None, mfu=0.3) for step in range(10)]
    a_run(tmp_path, records)
    _, page, curves = reported(tmp_path)
    assert list(curves) == ["loss", "gradient-norm", "learning-rate", "tokens", "mfu", "time", "memory"]
    training, validation = curves["loss"]
    assert training["steps"] == list(range(10))
    assert training["values"] == [each.loss for each in records]
    assert (validation["steps"], validation["values"]) == ([4, 9], [7.0, 12.0])
    times = {series["name"]: series["values"][0] for series in curves["time"]}
    assert times == {"computing": 0.06, "exposed communication": 0.01, "bubble": 0.02, "whole step": 0.1}
    # What the script knows is what is drawn: every point of every line.
    lines = [attributes["points"] or "" for tag, attributes in page.elements if tag == "polyline"]
    assert len(lines) == 7 and all(len(points.split()) == 10 for points in lines)
    drawn = [float(point.split(",")[1]) for point in lines[0].split()]
    slope = (drawn[9] - drawn[0]) / (records[9].loss - records[0].loss)
    assert drawn == pytest.approx([drawn[0] + slope * (r.loss - records[0].loss) for r in records], abs=0.11)


def test_the_page_tells_of_settings_and_events(tmp_path: Path) -> None:
    job = a_run(tmp_path, [record(0), record(1, skipped="the loss <b>is nan", loss=math.nan)])
    with Metrics(tmp_path, job.metrics, 2) as metrics:
        metrics.event("resume", step=2, restart=1, reason="rank 3 </script><script> was killed")
        metrics.write(record(2))
        metrics.event("checkpoint", step=3)
        metrics.event("done")
    text, page, curves = reported(tmp_path)
    assert (tmp_path / "settings.toml").read_text() == page.all_text("pre")
    cells = page.all_text("td")
    assert "restart 1, reason rank 3 </script><script> was killed" in cells and "checkpoint" in cells
    assert "3 of 10; ended" in cells and "unknown: no peak is known" in cells
    assert [tag for tag, _ in page.elements].count("script") == 1
    marks = [title for title in page.all_text("title").splitlines() if title.startswith("step ")]
    assert "step 1: update skipped: the loss <b>is nan" in marks and "step 2: resume" in marks
    assert curves["loss"][0]["values"] == [4.0, None, record(2).loss]
    assert "NaN" not in text


def test_a_line_breaks_where_a_loss_is_no_number(tmp_path: Path) -> None:
    a_run(tmp_path, [record(step, loss=math.nan if step == 4 else 2.0) for step in range(9)])
    text, _, _ = reported(tmp_path)
    loss = text[text.index('id="loss"') : text.index('id="gradient-norm"')]
    assert [len(points.split()) for points in re.findall(r'polyline points="([^"]*)"', loss)] == [4, 4]
    assert "step 4: training is not a number" in loss


@pytest.mark.parametrize("losses", [[2.0], [math.nan], [math.nan] * 5, [0.0, 0.0], [-3.0, -3.0], [1e30, 1e-30]])
def test_any_curve_can_be_drawn(tmp_path: Path, losses: list[float]) -> None:
    a_run(tmp_path, [record(step, loss=loss, computing_s=None, memory_bytes=None) for step, loss in enumerate(losses)])
    text, _, curves = reported(tmp_path)
    assert len(curves["loss"][0]["values"]) == len(losses)
    assert not re.search(r'="[^"]*(nan|inf)[^"]*"', text.replace('class="nan"', ""))


def test_a_run_that_crashed_before_its_first_step_or_in_a_line(tmp_path: Path) -> None:
    a_run(tmp_path, [])
    text, _, curves = reported(tmp_path)
    assert not curves and "no end was recorded" in text
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0, "lo')
    assert "lines that could not be read" in reported(tmp_path)[0]
    (tmp_path / "metrics.jsonl").unlink()
    assert not reported(tmp_path)[2]


def test_a_long_run_has_at_most_a_thousand_points_a_curve(tmp_path: Path) -> None:
    records = [record(step, loss=50.0 if step == 3333 else 2.0) for step in range(5000)]
    a_run(tmp_path, records, steps=5000)
    _, page, curves = reported(tmp_path)
    for series in (each for chart in curves.values() for each in chart):
        assert len(series["steps"]) <= 1000
        assert series["steps"] == sorted(series["steps"])
    assert 50.0 in curves["loss"][0]["values"]
    assert max(len((a["points"] or "").split()) for tag, a in page.elements if tag == "polyline") <= 1000


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
    text, _, _ = reported(tmp_path)
    picture = text[text.index('<div class="picture">') :]
    panels = picture.split('<g class="panel"')[1:]
    assert len(panels) == 2 and "measured" in panels[0] and "simulated" in panels[1]
    action = re.compile(r"<title>(\S+): \S+ to \S+</title><rect [^>]*fill=\"(#\w+)\"")
    above, below = (sorted(action.findall(panel)) for panel in panels)
    assert above == below
    assert [name for name, _ in above] == sorted(str(action) for _, action in schedule.actions)


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
    _, page, curves = reported(tmp_path)
    assert words in page.all_text("p") and curves["loss"]


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
