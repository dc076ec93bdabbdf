"""`cubeloom init`: a commented file that loads as what was asked for."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from commands import exit_code
from cubeloom import Grid
from cubeloom.base.settings import all_settings, load
from cubeloom.train.job import Job, check


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cubeloom.cli.init.gpus_seen", lambda: ("cpu", 0))
    (tmp_path / "text.txt").write_text("A text to train on. " * 40)
    return tmp_path


def test_what_is_chosen_is_set_and_all_else_is_a_comment(here: Path) -> None:
    options = ["--data", "text.txt", "--grid", "z=2,y=2", "--steps", 7, "--lr", "2e-3", "--dtype", "bf16"]
    assert exit_code("init", *options, "-o", "job.toml") == 0
    job = load(Job, here / "job.toml")
    check(job)
    assert (job.grid, job.steps, job.rate.peak, job.dtype) == (Grid(z=2, y=2), 7, 2e-3, "bfloat16")
    assert [str(each.stream) for each in job.data.sources] == ["text.txt"]
    assert str(job.folder) == "runs/job"
    text = (here / "job.toml").read_text()
    names = [each.name.rpartition(".")[2] for each in all_settings(Job) if "[]" not in each.name]
    assert all(f"\n{name} = " in text or f"\n# {name} =" in text for name in names)
    meaning = {each.name: each.meaning for each in all_settings(Job)}
    assert f"# {meaning['evaluation.every']}"[:60] in text
    assert max(map(len, text.splitlines())) <= 100


def test_comments_that_are_uncommented_are_the_defaults(here: Path) -> None:
    assert exit_code("init", "-o", "job.toml") == 0
    lines = (here / "job.toml").read_text().splitlines()
    known = {each.name.rpartition(".")[2] for each in all_settings(Job) if each.default is not None}
    whole = "\n".join(
        line.removeprefix("# ") if line.startswith("# ") and line.split()[1] in known and " = " in line else line
        for line in lines
    )
    assert "patience = 300" in tomllib.loads(whole).__repr__().replace("'", "").replace(": ", " = ")
    (here / "whole.toml").write_text(whole)
    assert load(Job, here / "whole.toml") == load(Job, here / "job.toml")


def test_questions_are_asked_on_a_terminal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["llama-tiny", "text.txt", "", "x=2", "4", "here"])
    asked: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)

    def answer(question: str) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr("builtins.input", answer)
    assert exit_code("init", "--steps", 5, "-o", "job.toml") == 0
    job = load(Job, here / "job.toml")
    found = (job.model.called, job.grid, job.steps, job.batch.samples, str(job.folder), job.device)
    assert found == ("llama-tiny", Grid(x=2), 5, 4, "here", "cpu")
    assert len(asked) == 6 and "[cpu]" in asked[2]


def test_a_folder_of_tokens_is_trained_on_and_validated_on(here: Path) -> None:
    assert exit_code("data", "prepare", "text.txt", "--validation", "0.3", "-o", "tokens") == 0
    assert exit_code("init", "--data", "tokens", "--batch", 2, "--sequence", 16, "-o", "job.toml") == 0
    job = load(Job, here / "job.toml")
    assert job.evaluation.every == 10 and str(job.data.sources[0].folder) == "tokens"
    check(job)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--grid", "y=5"], "grid y=5"),
        (["--model", "gpt-tinny"], "did you mean 'gpt-tiny'?"),
        (["--data", "nowhere"], "--data nowhere: there is no such file or folder"),
        (["--batch", "3", "--grid", "z=2"], "it must be a multiple of 2"),
    ],
)
def test_a_file_that_would_not_run_is_not_written(
    here: Path, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("init", *options, "-o", "job.toml") == 2
    assert told in capsys.readouterr().err
    assert not (here / "job.toml").exists()


def test_a_file_that_is_there_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job.toml").write_text("steps = 3\n")
    assert exit_code("init", "-o", "job.toml") == 2
    assert "job.toml exists: give another name with -o, or --force" in capsys.readouterr().err
    assert exit_code("init", "-o", "job.toml", "--force") == 0
