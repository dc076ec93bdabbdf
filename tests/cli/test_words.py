"""Help, options and settings on the command line: answered without torch, in 80 columns, from one source."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from commands import exit_code
from cubeloom import Grid
from cubeloom.base.settings import all_settings, load, sections
from cubeloom.cli import COMMANDS
from cubeloom.cli.words import split
from cubeloom.comm.kinds import Kind
from cubeloom.train.job import Job

ROOT = Path(__file__).parent.parent.parent
# What takes long to import; and who it would be imported for.
HEAVY = ("torch", "transformers", "pyarrow", "datasets", "tokenizers", "scipy", "pandas")
QUICK = [
    *([name, "--help"] for name in COMMANDS),
    ["launch", "slurm", "--help"],
    ["data", "prepare", "--help"],
    ["--help"],
    ["--version"],
    ["models"],
    ["settings", "--json"],
    ["trian"],
    ["train", "typo.toml"],
    ["train", "fine.toml", "--bacth.samples", "3"],
    ["train", "fine.toml", "--model.name", "gpt-tinny"],
    ["train", "fine.toml", "--model.heads", "5"],
    ["train", "fine.toml", "--lrr", "3"],
    ["train", "fine.toml", "--schedule.name", "chimaera"],
    ["train", "nowhere.toml"],
    ["launch", "slurm", "typo.toml"],
]
# Each in one process, where none would be imported by another: what comes last is what was imported for any of them.
PROGRAM = """
import json, sys
from cubeloom.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["cubeloom", *words]
    try:
        main()
    except SystemExit as left:
        codes.append(left.code)
print(json.dumps({"codes": codes, "modules": sorted(sys.modules)}))
"""


def test_help_and_mistakes_are_answered_without_torch(tmp_path: Path) -> None:
    (tmp_path / "typo.toml").write_text("stpes = 3\n")
    (tmp_path / "fine.toml").write_text("steps = 3\n")
    words = [sys.executable, "-c", PROGRAM, json.dumps(QUICK)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not {name for name in found["modules"] if name.partition(".")[0] in HEAVY}
    refused = QUICK.index(["trian"])
    assert found["codes"] == [0] * refused + [2] * (len(QUICK) - refused), done.stderr
    assert "unknown setting stpes; did you mean 'steps'?" in done.stderr
    assert "unknown setting bacth; did you mean 'batch'?" in done.stderr
    assert "unknown model 'gpt-tinny'; did you mean 'gpt-tiny'?" in done.stderr
    assert "there is no command 'trian'; did you mean 'train'?" in done.stderr
    assert "unknown option --lrr; did you mean --lr?" in done.stderr


def test_the_overview_has_every_command_in_a_group_and_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    told = capsys.readouterr().out.splitlines()
    groups = ["Train", "Understand", "Plan", "Cluster"]
    assert [line for line in told if line in groups] == groups
    assert max(map(len, told)) <= 80
    files = {path.stem for path in (ROOT / "src" / "cubeloom" / "cli").glob("*.py")}
    assert set(COMMANDS) == files - {"__init__", "groups", "options", "words"}


def fields(kind: Any, name: str = "") -> Iterator[str]:
    """Every field of a job, found without the code that describes them."""
    for field in dataclasses.fields(kind):
        hint = get_type_hints(kind)[field.name]
        path = f"{name}{field.name}"
        inside = [each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)]
        if not dataclasses.is_dataclass(hint):
            yield path
        for each in inside:
            yield from fields(each, f"{path}." if each is hint else f"{path}[].")


def test_settings_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("settings", "--json") == 0
    told = json.loads(capsys.readouterr().out)["settings"]
    assert sorted(each["name"] for each in told) == sorted(fields(Job))
    assert all(each["meaning"] and each["type"] for each in told)
    by_name = {each["name"]: each for each in told}
    assert (by_name["rate.peak"]["default"], by_name["rate.peak"]["type"]) == ("0.001", "number")
    assert by_name["batch.samples"]["default"] == "8"
    assert by_name["device"]["choices"] == list(get_args(Kind))
    assert by_name["model.vocab"]["default"] is None


def test_the_page_of_settings_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("settings", "--markdown") == 0
    assert (ROOT / "docs" / "settings.md").read_text() == capsys.readouterr().out, (
        "run `cubeloom settings --markdown > docs/settings.md`"
    )


def test_the_help_of_train_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "--help") == 0
    told = capsys.readouterr().out
    assert all(f"--{each.name} " in told for each in all_settings(Job) if "[]" not in each.name)


@pytest.mark.parametrize("name", [None, "optimizer", "rate.peak", "lr", "data.sources"])
def test_settings_of_a_section_fit_80_columns(name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("settings", *([] if name is None else [name])) == 0
    told = capsys.readouterr().out.splitlines()
    assert max(map(len, told)) <= 80
    assert any((name or "steps").replace("lr", "rate.peak") in line for line in told)


def test_a_section_that_is_not_there_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("settings", "optimiser") == 2
    assert "did you mean 'optimizer'?" in capsys.readouterr().err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text('[grid]\ny = 4\nplacement = ["x", "pipe", "data", "z", "y"]\n')
    return tmp_path / "job.toml"


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--rate.peak", "3e-4"], {"rate.peak": 3e-4}),
        (["--rate.peak=3e-4"], {"rate.peak": 3e-4}),
        (["--lr", "3e-4", "--steps", "7"], {"rate.peak": 3e-4, "steps": 7}),
        (["--lr=3e-4", "--steps=7"], {"rate.peak": 3e-4, "steps": 7}),
        (["--device", "cuda"], {"device": "cuda"}),
        (["--grid", "x=2,y=2"], {"grid.x": 2, "grid.y": 2, "grid.placement": ("x", "pipe", "data", "z", "y")}),
        (["--grid=pipe=2"], {"grid.pipe": 2, "grid.y": 1}),
        (["--grid.x", "2"], {"grid.x": 2, "grid.y": 4}),
        (["--dtype", "bf16"], {"dtype": "bfloat16"}),
        (["--layout.compile", "--steps", "3"], {"layout.compile": True, "steps": 3}),
        (["--layout.compile"], {"layout.compile": True}),
        (["--model.kv-heads", "4"], {"model.kv_heads": 4}),
    ],
)
def test_settings_in_either_form(file: Path, words: list[str], values: dict[str, Any]) -> None:
    own, overrides = split("train", [str(file), *words, "--json"])
    assert own == [str(file), "--json"]
    job: Any = load(Job, file, overrides)
    for path, value in values.items():
        found = job
        for name in path.split("."):
            found = getattr(found, name)
        assert found == value, path


def test_short_forms_in_a_file(file: Path) -> None:
    file.write_text('grid = "z=2,x=2"\nlr = 0.5\ndtype = "bf16"\n')
    found = load(Job, file)
    assert (found.grid, found.rate.peak, found.dtype) == (Grid(z=2, x=2), 0.5, "bfloat16")
    file.write_text("lr = 0.5\n[rate]\npeak = 0.25\n")
    assert exit_code("train", file) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps"], "--steps needs a value, as --steps VALUE or --steps=VALUE"),
        (["--learning-rate", "3"], "unknown option --learning-rate"),
        (["--peak", "3"], "unknown option --peak; did you mean --rate.peak?"),
        (["--micro-batches", "3"], "did you mean --schedule.microbatches?"),
        (["--grid", "q=2"], "unknown grid axis 'q'"),
        (["--grid", "2"], "grid is a section of settings, and got 2; set one of its fields, as grid.pipe"),
        (["--lr", "fast"], "rate.peak = 'fast' should be a number"),
        (["--rate.peek", "3"], "unknown setting rate.peek; did you mean 'peak'?"),
    ],
)
def test_a_wrong_option_is_told_with_what_is_nearest(
    file: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("train", file, *words) == 2
    said = capsys.readouterr().err
    assert told in said and said.startswith("cubeloom: ") and said.count("\n") == 1


def test_an_option_of_any_command_is_told_with_what_is_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("schedule", "1f1b", "--stagse", 4) == 2
    assert "unknown option --stagse; did you mean --stages? `cubeloom schedule --help`" in capsys.readouterr().err


def test_every_section_says_what_it_is() -> None:
    assert all(section.meaning for section in sections(Job))
