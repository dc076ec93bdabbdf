"""`cubeloom convert` as a person types it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tyro

from cubeloom import UserError
from cubeloom.cli.convert import Convert, bytes_of
from cubeloom.tools.convert import convert

from . import folders


def run(*arguments: object) -> int:
    return tyro.cli(Convert, args=[str(argument) for argument in arguments])()


def test_there_and_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = folders.saved(tmp_path / "theirs", folders.prepare(folders.gpt2()))
    capsys.readouterr()
    assert run(source, tmp_path / "ours") == 0
    said = capsys.readouterr().out
    assert said.endswith(f"{tmp_path / 'ours'}: imported a gpt of 28 tensors, 111,104 bytes of float32, in 1 file\n")
    assert run(tmp_path / "ours", tmp_path / "back", "--dtype", "bfloat16", "--shard-size", "10KB", "--json") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = json.loads(last)
    assert found["how"] == "exported"
    assert found["source"] == str(tmp_path / "ours" / "step-00000000")
    assert found["model"]["family"] == "gpt"
    assert (found["tensors"], found["bytes"], found["dtypes"]) == (28, 55_552, ["bfloat16"])
    assert found["files"] == len(list((tmp_path / "back").glob("*.safetensors"))) > 1


@pytest.mark.parametrize("way", ["import", "export"])
def test_progress_is_told_tensor_by_tensor(tmp_path: Path, way: str) -> None:
    source = folders.saved(tmp_path / "theirs", folders.prepare(folders.llama()))
    if way == "export":
        source = convert(source, tmp_path / "ours").target
    told: list[tuple[int, int]] = []
    done = convert(source, tmp_path / "target", progress=lambda _, done, total: told.append((done, total)))
    assert len(told) == done.tensors
    assert told == sorted(told)
    assert told[-1] == (done.bytes, done.bytes)


@pytest.mark.parametrize("name", ["run", "run/checkpoints", "run/checkpoints/step-00000002", "best"])
def test_what_is_taken(tmp_path: Path, name: str) -> None:
    """A run, its folder of checkpoints, or one of them, also under another name."""
    source = folders.saved(tmp_path / "theirs", folders.prepare(folders.gpt2()))
    convert(source, tmp_path / "run" / "checkpoints")
    first = tmp_path / "run" / "checkpoints" / "step-00000000"
    for copy in (first.with_name("step-00000002"), first.with_name("step-00000001"), tmp_path / "best"):
        shutil.copytree(first, copy)
    taken = "best" if name == "best" else "run/checkpoints/step-00000002"
    assert convert(tmp_path / name, tmp_path / "back").source == tmp_path / taken


@pytest.mark.parametrize(
    ("text", "count"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("10k", 10_000), ("7", 7), ("2TB", 2 * 10**12)]
)
def test_sizes(text: str, count: int) -> None:
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "GB", "five", "0", "0.0001KB", "-1", "1PB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match=r"it must be a number of bytes, KB, MB, GB or TB, such as 500MB"):
        bytes_of(text)
