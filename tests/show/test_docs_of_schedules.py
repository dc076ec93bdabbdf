"""Every command of docs/schedules.md runs, and prints what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tyro

from cubeloom.cli.schedule import Schedule

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```\n(?:\n^```text\n(.*?)^```)?", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("commands", "shown"), BLOCKS, ids=range(len(BLOCKS)))
def test_commands_print_what_is_shown(
    commands: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page may leave out the drawing and show the table only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for command in commands.splitlines():
        program, name, *arguments = shlex.split(command)
        assert (program, name) == ("cubeloom", "schedule")
        assert tyro.cli(Schedule, args=arguments)() == 0
    assert capsys.readouterr().out.rstrip().endswith(shown.rstrip())


def test_the_page_shows_what_it_promises() -> None:
    assert sum(bool(shown) for _, shown in BLOCKS) >= 6
