"""A real browser, a served explorer, and a folder of pictures."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

from cubeloom.pipeline import Costs, generate
from cubeloom.tools.explore.app import application
from cubeloom.tools.explore.serve import listening
from metrics.runs import a_run, record, write_timeline

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TOKEN = "a-token-of-tests"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Of one file: while its driver lives, no other test can run an event loop of its own."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: `apt-get install chromium`")
    playwright: Any = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pictures() -> Path:
    """build/pictures of the repository, where the last run leaves them."""
    folder = Path(__file__).parents[2] / "build" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of which was restarted and has a step without a loss."""
    folder = tmp_path_factory.mktemp("runs")
    for name, above in (("first", 0.0), ("below/second", 0.5)):
        nan = {30: float("nan")} if name == "first" else {}
        some = [
            record(
                step, loss=nan.get(step, 2 + above + 4 / (1 + step / 20)), mfu=0.4,
                validation=2.5 + above if step % 25 == 24 else None,
                skipped="the loss is nan" if step in nan else None,
            )
            for step in range(100)
        ]  # fmt: skip
        a_run(folder / name, some, steps=100)
        write_timeline(folder / name, generate("chimera", 4, 4), Costs((0.01,) * 4, (0.012,) * 4, (0.008,) * 4))
    return folder


@pytest.fixture(scope="module")
def explorer(runs: Path) -> Iterator[str]:
    """Its address."""
    listener = listening(0)
    server = uvicorn.Server(uvicorn.Config(application(TOKEN, runs), log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/{TOKEN}/"
    server.should_exit = True
    thread.join(10)
