"""What the documents say is run: commands, scripts, settings, links.

- In a ```console (or ```bash) block every line that starts with `$ ` is a command. It must exit 0, or N where it ends in
  `# exit N`. `make` and set-up commands are not run, but a `make` target must exist.
- A ```python block is a whole script.
- `--grid ...` in a table of the README is a setting of `cubeloom verify`, and must train as the serial model does.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tyro

from cubeloom.cli import main
from cubeloom.cli.verify import Verify
from cubeloom.tools.verify import report
from scripts import run_script
from serial_runs import Verified

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
RUN = ("cubeloom", "python")
NOT_RUN = ("make", "pip", "git", "cd")


def fences(page: Path, *languages: str) -> Iterator[str]:
    """The blocks in these languages, also those indented in a list."""
    for language, body in re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        if language in languages:
            yield textwrap.dedent(body)


def every_command() -> dict[str, str]:
    """Each command once, with the page where it was first found. A page's commands run in a folder of the page."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in fences(page, "console", "bash"):
            for line in block.splitlines():
                if line.startswith("$ "):
                    found.setdefault(line.removeprefix("$ ").strip(), page.name)
    return found


def program(command: str) -> str:
    """The first word that is not an assignment: `OMP_NUM_THREADS=1 python x.py` is python."""
    return next(word for word in shlex.split(command, comments=True) if not re.fullmatch(r"\w+=.*", word))


COMMANDS = every_command()
FIRST = next(command for command in COMMANDS if command.startswith("cubeloom "))
SCRIPTS = [(page.name, script) for page in PAGES for script in fences(page, "python")]
SETTINGS = re.findall(r"`(--grid [^`]+)`", (ROOT / "README.md").read_text())


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a reader of a page would be, but for what commands write there."""

    @cache
    def folder_of(page: str) -> Path:
        made = tmp_path_factory.mktemp(f"reader-of-{page}")
        for name in ("examples", "bench"):
            (made / name).symlink_to(ROOT / name)
        return made

    return folder_of


@pytest.fixture
def folder(page: str, folder_of: Callable[[str], Path]) -> Path:
    return folder_of(page)


def call(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a `cubeloom` command, run in this process: that saves the import of torch, which is most of it."""
    monkeypatch.setattr(sys, "argv", shlex.split(command, comments=True))
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a reader would type it, or the same without another import of torch."""
    plain = not set(command) & set("|<>;&$")
    script = re.match(r"python (\S+\.py)", command)
    words = shlex.split(command, comments=True)
    if script and plain:
        return run_script(folder / script[1], *words[2:], folder=folder)
    if words[:2] == ["python", "-c"] and len(words) == 3:
        file = folder / "command.py"
        file.write_text(words[2])
        return run_script(file, folder=folder)
    # Commands of the same environment as these tests.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    shell = ["bash", "-c", command]
    return subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=170)


@pytest.fixture
def on_shared_ranks(command: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a `cubeloom verify` of a preset train on the session's ranks. Paths are those of this test, where no rank is."""
    if command.startswith("cubeloom verify ") and "/" not in command and ".toml" not in command:
        ranks = request.getfixturevalue("ranks")
        monkeypatch.setattr(report, "RankPool", lambda *_: nullcontext(ranks))


@pytest.mark.slow
@pytest.mark.usefixtures("on_shared_ranks")
@pytest.mark.parametrize(
    ("page", "command"), [(page, command) for command, page in COMMANDS.items() if program(command) in RUN]
)
def test_a_command_does_what_the_page_says(
    page: str, command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.search(r"# exit (\d+)$", command)
    promised = int(found[1]) if found else 0
    # The first as a reader would type it; so are those that are more than a call of ours.
    if command.startswith("cubeloom ") and not set(command) & set("|<>;&$") and command != FIRST:
        monkeypatch.chdir(folder)
        assert call(command, monkeypatch) == promised, page
        return
    done = run(command, folder)
    assert done.returncode == promised, f"{page}:\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "script"), SCRIPTS, ids=[page for page, _ in SCRIPTS])
def test_a_script_runs(page: str, script: str, folder: Path) -> None:
    file = folder / "script.py"
    file.write_text(script)
    done = run_script(file, folder=folder)
    assert done.returncode == 0, f"{page}:\n{done.stdout}{done.stderr}"


def test_the_readme_names_every_part_of_the_package() -> None:
    parts = {each.parent.name for each in (ROOT / "src" / "cubeloom").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/ ", (ROOT / "README.md").read_text(), re.MULTILINE)) == parts


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_trains_as_the_serial_model(setting: str, verified: Verified) -> None:
    experiment = tyro.cli(Verify, args=shlex.split(setting)).experiment()
    report = verified(replace(experiment, steps=1, batch=replace(experiment.batch, sequence=8)))
    assert report.ok, report.as_json()


def test_no_command_is_passed_over_in_silence() -> None:
    strange = [command for command in COMMANDS if program(command) not in RUN + NOT_RUN]
    assert not strange, f"test_docs knows {', '.join(RUN + NOT_RUN)}, not {strange}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^\$ make ([a-z-]+)|`make ([a-z-]+)`", page.read_text(), re.MULTILINE))
    assert {first or second for first, second in named} <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        if heading:
            assert heading in headings(target), f"{page.name} links to {link}, and that page has no such heading"


def headings(page: Path) -> set[str]:
    """As GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
