"""The explorer in a real browser: every view in both themes and on a phone, and what people do there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from metrics.runs import a_run, record

from .browsed import Theme, looked_at, looks, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
SMALL = "plan?model=gpt-tiny&cluster=perlmutter&devices=8&batch=16"
VIEWS = {
    "plan": SMALL,
    "schedules": "schedules?stages=4&microbatches=8&sync=eager&reduce=1",
    "layouts": "layouts",
    "runs": "runs?names=first,below/second",
}


def ready(page: Page) -> None:
    from playwright.sync_api import expect

    expect(page.locator("#state")).to_have_text(re.compile("^Up to date"), timeout=60_000)


@looks
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_fits_every_width_in_both_themes(
    chromium: Browser, explorer: str, pictures: Path, view: str, theme: Theme, width: int
) -> None:
    with opened(chromium, f"{explorer}#{VIEWS[view]}", theme, width) as page:
        ready(page)
        assert page.locator("nav a[aria-current=page]").inner_text().lower() == view
        assert page.locator("#view .card").count() >= 2
        looked_at(page, theme, pictures / f"explore-{view}-{theme}-{width}.png")


def test_controls_answer_and_the_address_keeps_what_was_chosen(chromium: Browser, explorer: str) -> None:
    with opened(chromium, f"{explorer}#{SMALL}") as page:
        ready(page)
        before = page.locator(".lead").inner_text()
        page.get_by_label("Devices", exact=True).fill("4")
        page.wait_for_url("**/*devices=4*")
        page.locator("#state", has_text="Up to date").wait_for()
        page.locator(".lead", has_not_text=before).wait_for()
        ready(page)
        page.locator("button.choose").nth(1).press("Enter")
        chosen = page.locator(".detail h2").first.inner_text()
        assert chosen.startswith("Selected: ") and "strategy=1" in page.url
        assert "[grid]" in page.locator("pre").inner_text()
        link = page.url
    with opened(chromium, link) as page:  # as somebody sees it to whom the link was sent
        ready(page)
        assert page.get_by_label("Devices", exact=True).input_value() == "4"
        assert page.locator(".detail h2").first.inner_text() == chosen
        assert page.locator("button.choose[aria-pressed=true]").count() == 1


def test_a_mistake_is_said_and_the_page_goes_on(chromium: Browser, explorer: str) -> None:
    page = chromium.new_page()
    page.goto(f"{explorer}#layouts?y=5&z=1&x=1")
    page.locator("#state.wrong").wait_for()
    assert "cannot be cut over y=5" in page.locator("#state").inner_text()
    page.get_by_label("y: cuts outputs, then inputs", exact=True).fill("2")
    ready(page)
    page.close()


def test_an_action_shows_what_it_waited_for_to_pointer_and_keyboard(chromium: Browser, explorer: str) -> None:
    with opened(chromium, f"{explorer}#schedules?name=1f1b&compare=none&stages=4&microbatches=4") as page:
        ready(page)
        assert page.locator("[data-place]").count() == 4 * 4 * 2
        page.locator("[data-place='4']").first.hover()
        assert "backward" in page.locator("#tip").inner_text() and "waited for 1B0" in page.locator("#tip").inner_text()
        assert page.locator(".act.before").count() == 2
        page.mouse.move(0, 0)
        page.get_by_role("region", name=re.compile("^Timeline of 1f1b")).focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        assert page.locator("#tip .head").inner_text() == "0F2: forward"
        page.keyboard.press("ArrowDown")
        assert page.locator("#tip .head").inner_text().startswith("1")
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()


def test_a_rank_s_blocks_are_marked(chromium: Browser, explorer: str) -> None:
    with opened(chromium, f"{explorer}#layouts?z=2&y=2&x=1") as page:
        ready(page)
        marked = page.locator("rect.mine").count()
        assert marked == page.locator(".parameter").count() > 5
        page.get_by_role("button", name="rank 3: data 0, z 1, y 1, x 0").click()
        assert page.locator("rect.mine").count() == marked and "rank=3" in page.url
        assert "no other rank has this block" in page.locator(".parameter figcaption").first.inner_text()


def test_the_theme_is_switched_and_kept(chromium: Browser, explorer: str) -> None:
    with opened(chromium, f"{explorer}#schedules") as page:
        ready(page)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.locator("#theme").click()  # light
        page.locator("#theme").click()  # dark
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_run_that_trains_is_followed(chromium: Browser, explorer: str, runs: Path) -> None:
    with opened(chromium, f"{explorer}#runs?names=first") as page:
        ready(page)
        assert page.locator(".uplot canvas").count() >= 6
        assert page.locator("dd", has_text="100 of 100").count() == 1
        page.locator("summary", has_text="Table").first.click()
        page.locator(".chart summary").first.focus()
        with (runs / "first" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(100).as_json()) + "\n")
        page.locator("dd", has_text="101 of 100").wait_for(timeout=10_000)
        loss = page.locator("figure.chart").first
        assert loss.locator("details[open] tbody tr").last.inner_text().split()[0] == "100"
        loss.locator(".plot").focus()
        page.keyboard.press("ArrowLeft")
        assert loss.locator(".u-value").first.inner_text() == "100"  # the new step is on the curve


def test_ten_thousand_steps_scroll_smoothly(chromium: Browser, explorer: str, runs: Path) -> None:
    """Half of the frames while the page scrolls take no longer than a twentieth of a second, on a machine under load."""
    a_run(runs / "long", [record(step, loss=3 + (step * 7919 % 100) / 100) for step in range(10_000)], steps=10_000)
    with opened(chromium, f"{explorer}#runs?names=long") as page:
        ready(page)
        page.evaluate(FRAMES_BEGIN)
        for _ in range(40):
            page.mouse.wheel(0, 60)
            page.wait_for_timeout(16)
        took: list[Any] = page.evaluate("window.frames_")
        assert len(took) > 10 and sorted(took)[len(took) // 2] < 50


FRAMES_BEGIN = """() => {
  window.frames_ = [];
  let last = performance.now();
  const next = (now) => { window.frames_.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
}"""
