"""Pages that stand alone, opened as files: they draw all that they hold, in both themes and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cubeloom.pipeline import generate, simulate
from cubeloom.pipeline.drawing import to_html
from cubeloom.plan.report import page as plan_page
from cubeloom.plan.reproduce import page as reproduced_page
from cubeloom.plan.reproduce import reproduce
from cubeloom.plan.search import on_devices, search
from cubeloom.train.metrics import write_report

from .browsed import Theme, looked_at, looks, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow
SCHEDULES = ("1f1b", "chimera", "zb-h1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    answer = search("gpt-5b", "dgx-h100", 16, 64, 512)
    texts = {
        "plan": plan_page(answer, [on_devices(answer, 8)]),
        "reproduced": reproduced_page(reproduce("tensor3d")),
        "schedule": to_html([simulate(generate(name, 4, 8)) for name in SCHEDULES], ["", "a note <b>"]),
    }
    found = {name: folder / f"{name}.html" for name in (*texts, "report")}
    for name, text in texts.items():
        found[name].write_text(text)
    write_report(runs / "first", found["report"])
    return found


@looks
@pytest.mark.parametrize("name", ["plan", "schedule", "report", "reproduced"])
def test_every_page_fits_every_width_in_both_themes(
    chromium: Browser, files: dict[str, Path], pictures: Path, name: str, theme: Theme, width: int
) -> None:
    with opened(chromium, files[name].as_uri(), theme, width) as page:
        page.locator(".card").first.wait_for()
        looked_at(page, theme, pictures / f"{name}-{theme}-{width}.png")


def test_a_plan_has_its_strategies_limits_and_settings(chromium: Browser, files: dict[str, Path]) -> None:
    with opened(chromium, files["plan"].as_uri()) as page:
        heads = page.locator("h2").all_inner_texts()
        assert {"Strategies", "Where the time of a step goes", "Where the memory of a device goes"} <= set(heads)
        assert "Other numbers of devices" in heads
        strategies = page.locator("tr[data-place]").count()
        assert strategies == page.locator(".interval").count() == page.locator(".limit").count() > 4
        assert page.locator(".bar-axis span").count() > 6  # every scale has its axis
        page.locator("button.choose", has_text="FSDP").click()
        assert page.locator("h2", has_text="Selected: FSDP").count() == 1
        assert "z = 16" in page.locator("pre").inner_text()


def test_a_schedule_s_every_action_is_drawn_to_scale(chromium: Browser, files: dict[str, Path]) -> None:
    with opened(chromium, files["schedule"].as_uri()) as page:
        timelines = [simulate(generate(name, 4, 8)) for name in SCHEDULES]
        longest = max(timeline.makespan for timeline in timelines)
        figures = page.locator("figure.timeline")
        assert figures.count() == len(timelines)
        assert "a note <b>" in figures.nth(1).inner_text()
        widths = []
        for number, timeline in enumerate(timelines):
            spans = [span for row in timeline.spans for span in row]
            boxes = figures.nth(number).locator("[data-place] rect")
            assert boxes.count() == len(spans)
            drawn = boxes.evaluate_all(
                "all => all.map(box => [Number(box.getAttribute('x')), Number(box.getAttribute('width'))])"
            )
            scale = drawn[0][1] / (spans[0].end - spans[0].start)
            left = drawn[0][0] - spans[0].start * scale
            assert drawn == [
                [pytest.approx(left + s.start * scale), pytest.approx((s.end - s.start) * scale)] for s in spans
            ]
            widths.append(scale * longest)
        assert widths == pytest.approx([widths[0]] * len(widths))  # all on one scale


def test_a_report_draws_every_curve_and_says_where_there_is_no_number(
    chromium: Browser, files: dict[str, Path]
) -> None:
    with opened(chromium, files["report"].as_uri()) as page:
        charts = page.locator("figure.chart")
        names = [charts.nth(n).get_attribute("data-chart") for n in range(charts.count())]
        assert names == ["loss", "gradient-norm", "learning-rate", "tokens", "mfu", "time", "memory"]
        assert page.locator(".uplot canvas").count() == len(names)
        loss = charts.first
        assert "step 30: training is not a number" in (loss.text_content() or "")
        assert "step 30: update skipped: the loss is nan" in (loss.text_content() or "")
        loss.locator("summary", has_text="Table").click()
        rows = loss.locator("table").last.locator("tbody tr").all_inner_texts()
        assert rows[0].split() == ["0", "6", "-"] and len(rows) == 25
        loss.locator(".plot").focus()
        page.keyboard.press("ArrowRight")
        assert loss.locator(".u-value").all_inner_texts()[:2] == ["0", "6"]
        assert page.locator("figure.timeline").count() == 2
