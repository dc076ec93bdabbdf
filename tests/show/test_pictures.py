"""Pictures hold what the timelines say, every action once and to scale."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from rich.console import Console

from cubeloom.pipeline import Costs, Sync, Timeline, generate, simulate, synchronised
from cubeloom.pipeline.drawing import drawing, summary, to_html, to_svg, to_trace
from pages.data import Page

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def timelines() -> list[Timeline]:
    return [simulate(generate(name, 4, 4)) for name in ("1f1b", "chimera", "chimera-zb")]


def printed(text: object, width: int = 100) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(text)
    return capture.get()


def test_the_terminal_shows_actions_to_scale(timelines: list[Timeline]) -> None:
    rows = printed(drawing(timelines[1:2], 69, colours=False)).splitlines()
    assert rows[0] == " P0  F0░░F1░░····F2░░B2▓▓▓▓▓▓F3░░B3▓▓▓▓▓▓····B0▓▓▓▓▓▓········B1▓▓▓▓▓▓"
    assert len({len(row) for row in rows if row}) == 1


def test_schedules_in_the_terminal_share_one_scale(timelines: list[Timeline]) -> None:
    lines = printed(drawing(timelines, 69, colours=False)).splitlines()
    widths = {name: len(lines[lines.index(name) + 1]) - 5 for name in ("1f1b", "chimera", "chimera-zb")}
    scale = widths["1f1b"] / 21
    assert widths == {"1f1b": 21 * scale, "chimera": 16 * scale, "chimera-zb": 13 * scale}


def test_a_long_schedule_still_fits(timelines: list[Timeline]) -> None:
    long = simulate(generate("1f1b", 8, 128))
    assert max(map(len, printed(drawing([long], 80, colours=False), 200).splitlines())) <= 80


def test_colours_tell_directions_apart(timelines: list[Timeline]) -> None:
    console = Console(width=100, color_system="truecolor", force_terminal=True)
    with console.capture() as capture:
        console.print(drawing(timelines[1:2], 100))
    row = capture.get().splitlines()[0]
    backgrounds = re.findall(r"48;2;(\d+);(\d+);(\d+)", row)
    assert len(set(backgrounds)) == 4  # forward and backward, down and up


def test_the_summary_has_the_figures(timelines: list[Timeline]) -> None:
    lines = printed(summary(timelines)).splitlines()
    assert lines[2].split() == ["chimera", "16", "12", "25.0%", "3", "to", "4", "2"]


def test_the_svg_draws_every_action_where_it_runs(timelines: list[Timeline]) -> None:
    root = ElementTree.fromstring(to_svg(timelines))
    panels = [group for group in root.iter(f"{SVG}g") if group.get("class") == "panel"]
    assert len(panels) == len(timelines)
    scale = 1100 / 21
    for panel, timeline in zip(panels, timelines, strict=True):
        drawn = {}
        for group in panel.iter(f"{SVG}g"):
            if group.get("class") == "act":
                title, box = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
                assert title is not None and title.text is not None and box is not None
                drawn[title.text.split(":")[0]] = (float(box.get("x", "")) - 44, float(box.get("width", "")))
        spans = {str(s.action): s for row in timeline.spans for s in row}
        assert drawn.keys() == spans.keys()
        for name, (x, width) in drawn.items():
            assert x == pytest.approx(spans[name].start * scale, abs=0.01)
            assert width == pytest.approx((spans[name].end - spans[name].start) * scale, abs=0.01)


def test_the_svg_shows_reductions_and_halves() -> None:
    halved = synchronised(generate("chimera", 4, 4, mode="halving"), Sync.EAGER)
    costs = replace(Costs.uniform(4), reduce=(1.0,) * 4)
    text = to_svg([simulate(halved, costs)])
    assert text.count("<title>reduction of stage") == 2 * 4
    assert ">0a<" in text and ">0b<" in text


def test_the_page_stands_alone_and_knows_what_was_waited_for(timelines: list[Timeline]) -> None:
    page = Page(to_html(timelines, heading="a < b"))
    assert page.all_text("h1") == "a < b"
    panels = [each["actions"] for each in page.data["timelines"]]
    for entries, timeline in zip(panels, timelines, strict=True):
        assert [entry["name"] for entry in entries] == [str(action) for _, action in timeline.schedule.actions]
        for entry in entries:
            assert entry["start"] >= max((need["arrives"] for need in entry["needs"]), default=0.0)
    first = next(entry for entry in panels[0] if entry["name"] == "1B0")
    assert [panels[0][need["at"]]["name"] for need in first["needs"]] == ["1F0", "2B0"]


def test_the_trace_has_every_action_message_and_level(timelines: list[Timeline]) -> None:
    timeline = simulate(generate("chimera", 4, 4), Costs.uniform(4, message=0.5))
    events = json.loads(to_trace([timeline, *timelines]))["traceEvents"]
    mine = [event for event in events if event["pid"] == 0]
    slices = {event["name"]: event for event in mine if event["ph"] == "X"}
    assert slices.keys() == {str(action) for _, action in timeline.schedule.actions}
    span = timeline.spans[2][3]
    assert slices[str(span.action)]["ts"] == span.start * 1000
    assert slices[str(span.action)]["tid"] == 2
    # 4 micro-batches over 3 hops, forward and back, each an arrow with two ends.
    assert [event["ph"] for event in mine].count("s") == 4 * 3 * 2
    assert [event["ph"] for event in mine].count("f") == 4 * 3 * 2
    levels = [e["args"]["micro-batches"] for e in mine if e["name"] == "activations of worker 0"]
    assert max(levels) == timeline.peak_activations[0]
