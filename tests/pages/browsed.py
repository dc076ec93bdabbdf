"""A page in the browser: what it complained about, whether it fits, and its picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from grids import rest_is_long

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Theme = Literal["light", "dark"]
LOOKS: list[tuple[Theme, int]] = [("light", 1400), ("light", 400), ("dark", 1400), ("dark", 400)]
# In the short suite each theme and each width.
looks = pytest.mark.parametrize(("theme", "width"), rest_is_long(LOOKS, [("light", 1400), ("dark", 400)]))
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
# Elements that reach over the page's right edge, but for those inside one that scrolls.
TOO_WIDE = """() => {
  const scrolls = (each) => each !== null && (getComputedStyle(each).overflowX !== "visible" || scrolls(each.parentElement));
  const edge = document.documentElement.clientWidth + 1;
  return [...document.querySelectorAll("body *")].filter((each) =>
    each.getBoundingClientRect().right > edge && !scrolls(each.parentElement)).map((each) => each.outerHTML.slice(0, 120));
}"""
UNNAMED = """() => [...document.querySelectorAll("button, input, select, a")].filter((element) =>
  !element.textContent.trim() && !element.getAttribute("aria-label") && !(element.labels && element.labels.length)
).map((element) => element.outerHTML.slice(0, 120))"""


@contextmanager
def opened(chromium: Browser, address: str, theme: Theme = "light", width: int = 1400) -> Iterator[Page]:
    """The page, which must make no request to anywhere else and print nothing on the console."""
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    yield page
    assert not said
    own = address.partition("#")[0]
    assert not [url for url in asked if not url.startswith((own, "data:"))]
    page.close()


def looked_at(page: Page, theme: Theme, picture: Path) -> None:
    """It fits its width, has the theme's ground, names all that can be operated; and its picture is kept."""
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate(UNNAMED) == []
    red = int(page.evaluate(BACKGROUND).partition("(")[2].partition(",")[0])
    assert (red < 64) is (theme == "dark")
    page.screenshot(path=picture, full_page=True)
