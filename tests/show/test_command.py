"""`cubeloom schedule`, from its arguments to what it prints."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import tyro

from cubeloom import UserError
from cubeloom.cli.schedule import Schedule
from cubeloom.pipeline import Costs, check, from_csv, from_json, generate, names, simulate
from cubeloom.pipeline import Schedule as Value


def run(arguments: str) -> int:
    return tyro.cli(Schedule, args=shlex.split(arguments))()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chimera --stages 8 --microbatches 8 --pairs 2 --format json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["name"], data["stages"], data["microbatches"], data["makespan"]) == ("chimera", 8, 8, 28)
    assert from_json(json.dumps(data)) == generate("chimera", 8, 8, pairs=2)


def test_compare_prints_the_table_of_the_issue(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--compare 1f1b,chimera,zb-h1,chimera-zb --stages 8 --microbatches 8") == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[-4:]]
    assert rows == [
        ["1f1b", "45", "24"],
        ["chimera", "36", "24"],
        ["zb-h1", "31", "24"],
        ["chimera-zb", "27", "24"],
    ]


def test_costs_reach_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("1f1b --stages 4 --microbatches 8 --costs F=2,I=1,W=1,p2p=0.25 --format json") == 0
    costs = Costs((2.0,) * 4, (1.0,) * 4, (1.0,) * 4, message=0.25)
    assert json.loads(capsys.readouterr().out)["makespan"] == simulate(generate("1f1b", 4, 8), costs).makespan


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("form", ["table", "text", "csv", "json", "svg", "html", "perfetto"])
def test_every_name_in_every_form(name: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{name} --stages 4 --microbatches 8 --format {form}") == 0
    out = capsys.readouterr().out
    readers = {"text": Value.parse, "csv": from_csv, "json": from_json}
    if form in readers:
        schedule = check(readers[form](out))
        assert (schedule.name, schedule.microbatches, len(schedule.workers)) == (name, 8, 4)
    else:
        assert name in out


@pytest.mark.parametrize("suffix", ["txt", "csv", "json"])
def test_what_was_saved_is_loaded_and_checked(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"mine.{suffix}"
    form = {"txt": "text"}.get(suffix, suffix)
    assert run(f"chimera --stages 4 --microbatches 6 --mode halving --format {form} -o {path}") == 0
    assert capsys.readouterr().out == ""
    assert run(f"--load {path} --format text") == 0
    assert Value.parse(capsys.readouterr().out) == generate("chimera", 4, 6, mode="halving")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine.csv", b"0F0,0B0\n1F0\n", "micro-batch 0 on stage 1 has 1F0"),
        ("mine.txt", b"", "the last line of a schedule reads"),
        ("mine.txt", b"\xff\xfe", "is no text"),
        ("mine.json", b'{"name": "a", "stages": "x", "microbatches": 1, "workers": []}', "a schedule's JSON has"),
        ("mine.json", b'{"name": "a", "stages": 1, "microbatches": 1, "workers": [[3]]}', "a schedule's JSON has"),
        ("mine.json", b"[]", "a schedule's JSON has"),
    ],
)
def test_a_loaded_schedule_that_is_wrong_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        run(f"--load {path}")


def test_a_settings_file_says_the_schedule_alone(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[grid]\npipe = 2\n")
    with pytest.raises(UserError, match="--stages is what"):
        run(f"{file} --stages 4")


def test_reductions_and_recomputation(capsys: pytest.CaptureFixture[str]) -> None:
    makespans = []
    for options in ("", "--sync end", "--sync eager", "--recompute"):
        assert run(f"chimera --stages 4 --microbatches 4 --reduce 2 {options} --format json") == 0
        makespans.append(json.loads(capsys.readouterr().out)["makespan"])
    assert makespans[:3] == [20, 20, 18]
    assert makespans[3] > 20


def test_auto_says_how_far_it_is_from_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("auto --stages 4 --microbatches 8 --placement linear") == 0
    assert "auto: 0.0% above the lower bound of 27; the best named one takes 27 (zb-h1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("1f1b --stages 4 --microbatches 4 --reduce nan", "--reduce nan: a cost is a finite number"),
        ("auto --stages 1000000000 --microbatches 4", "forwards: at most 250,000"),
        ("", "give either the NAME"),
        ("chimera --compare 1f1b --stages 4 --microbatches 4", "give either the NAME"),
        ("chimera --stages 4", "needs --stages and --microbatches"),
        ("chimera --stages 5 --microbatches 4", "try 4 or 6"),
        ("chimera --stages 4 --microbatches 4 --costs G=1", "unknown cost 'G'"),
        ("1f1b --stages 4 --microbatches 4 --pairs 2", "no option pairs; it is one of chimera, chimera-zb, auto"),
        ("--compare , --stages 4 --microbatches 4", "--compare needs names"),
        ("--compare 1f1b,chimera --stages 4 --microbatches 4 --format csv", "CSV holds one schedule"),
        ("1f1b --load x.csv", "leave out NAME"),
        ("--load /nowhere/x.csv", "cannot read"),
        ("1f1b --stages 4 --microbatches 4 -o /nowhere/x.svg", "cannot write"),
        ("1f2b --stages 4 --microbatches 4", "did you mean '1f1b'"),
    ],
)
def test_mistakes_are_named(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(arguments)
