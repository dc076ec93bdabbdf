"""`cubeloom data` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from commands import exit_code
from cubeloom.cli import data

from .files import STORIES, json_lines


def run(*arguments: object) -> int:
    return exit_code("data", *arguments)


def test_prepare_and_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, out = json_lines(tmp_path / "a.jsonl", STORIES, field="story"), tmp_path / "out"
    for how in ("written", "already there"):
        assert run("prepare", source, "--out", out, "--field", "story", "--validation", 0.5, "--json") == 0
        said = capsys.readouterr()
        assert said.out.count("\n") == 1
        result = json.loads(said.out)
        assert (result["how"], result["vocabulary"]) == (how, 257)
        assert result["documents"] == {"training": 2, "validation": 2}
        assert "hashing: " in said.err
    assert run("show", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    tokens = out / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[::-1])
    assert run("show", out) == 1
    assert "DAMAGED: tokens.bin" in capsys.readouterr().out


def test_a_refusal_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("prepare", tmp_path / "nowhere.txt", "--out", tmp_path / "out") == 2
    said = capsys.readouterr()
    assert said.err == f"cubeloom: no file at {tmp_path}/nowhere.txt\n"
    assert said.out == ""


def test_an_interruption_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cubeloom.train.data.prepare", interrupted)
    assert run("prepare", "a.txt", "--out", tmp_path / "out") == 130
    assert "the same command resumes" in capsys.readouterr().out


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    with (tmp_path / "screen").open("w+") as screen:
        with data.shown(Console(file=screen, force_terminal=True, width=80)) as progress:
            progress("hashing", 5, 10)
            progress("hashing", 10, 10)
        screen.seek(0)
        assert "━" in screen.read()
