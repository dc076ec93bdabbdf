"""The site of the documentation: it builds without a warning, loads nothing from elsewhere, and generated files are current."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from commands import exit_code

ROOT = Path(__file__).parent.parent
TEXT = ROOT / "examples" / "text.py"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    found = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert found is not None and found.loader is not None
    made = importlib.util.module_from_spec(found)
    found.loader.exec_module(made)
    return made


def test_generated_files_are_current(hooks: ModuleType) -> None:
    for path, text in hooks.generated().items():
        assert path.read_text() == text, f"run `python docs/hooks.py`: {path.name} is out of date"


def test_the_commands_page_has_every_option(hooks: ModuleType) -> None:
    page = hooks.commands_page()
    for option in ("`--address TEXT`", "`--cpus-per-rank INT`", "#### `cubeloom data show`", "`--output, -o PATH`"):
        assert option in page


class Loaded(HTMLParser):
    """The addresses that a browser fetches when it shows a page; what a reader may click is not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        fetched = named.get("href") if tag == "link" and named.get("rel") != "canonical" else named.get("src")
        self.found += [fetched] if fetched else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(site.rglob("*.html")):
        yield path, path.read_text()


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    seen = 0
    for path, text in pages(site):
        loaded = Loaded()
        loaded.feed(text)
        seen += len(loaded.found)
        outside = [each for each in loaded.found if re.match(r"(?:[a-z]+:)?//", each)]
        assert not outside, f"{path.name} loads {outside}"
    assert seen > 100
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", path.read_text()), path


@pytest.mark.slow
def test_every_page_is_there(site: Path) -> None:
    names = {path.relative_to(site).as_posix() for path, _ in pages(site)}
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md")} <= names
    assert {"readme.html", "contributing.html", "changelog.html"} <= names
    api = (site / "api.html").read_text()
    for name in ("parallelize", "clip_grad_norm_", "save_pretrained", "RankPool"):
        assert f">{name}<" in api or f"{name}(" in re.sub(r"<[^>]+>", "", api), name
    assert (site / "examples" / "any_model.py").exists()


def keys_of(command: str) -> set[str]:
    """The keys that docs/json.md lists for a command, without those of another option."""
    page = (ROOT / "docs" / "json.md").read_text()
    row = re.search(rf"^\| `{re.escape(command)}` \| (.*) \|$", page, re.MULTILINE)
    assert row is not None, command
    plain = re.sub(r"\([^)]*\)|: a list of.*|; with.*", "", row[1])
    return set(re.findall(r"`(\w+)`", plain))


@pytest.mark.slow
def test_json_has_the_keys_that_the_page_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ("--steps=2", "--batch.samples=2", "--batch.sequence=8", "--grid=x=1")
    plan = ("--model", "gpt2", "--cluster", "dgx-h100", "--devices", 8, "--global-batch", 64, "--top", 1)
    for command, options in (
        ("settings", ("batch", "--json")),
        ("schedule --format json", ("1f1b", "--stages", 2, "--microbatches", 2, "--format", "json")),
        ("data show", ("tokens", "--json")),
        ("plan", (*plan, "--json")),
        ("train", ("job.toml", *quick, "--json")),
        ("sample", ("run", "--prompt", "a", "--tokens", 2, "--json")),
        ("report", ("run", "--json")),
        ("reproduce", ("cube", "--json")),
    ):
        if command == "data show":
            assert exit_code("data", "prepare", TEXT, "-o", "tokens", "--json") == 0
            shown = json.loads(capfd.readouterr().out.splitlines()[-1])
            assert set(shown) == {"how", *keys_of("data show")} - {"ok"}
        if command == "train":
            Path("job.toml").write_text(f'folder = "run"\ndata.sources = [{{stream = "{TEXT}"}}]\n')
        words = command.removesuffix(" --format json").split()
        assert exit_code(*words, *options) == 0
        found = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert set(found) == keys_of(command), command
