"""Files that somebody damaged, or made up to harm whoever reads them: refused in a sentence, and nothing is executed."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from commands import exit_code
from cubeloom.base.errors import UserError
from cubeloom.base.files import checksum, write_sealed
from cubeloom.launch import RankPool
from cubeloom.train.checkpoint import read_manifest, seal
from hostile import (
    KINDS,
    Kind,
    Project,
    crafted,
    load_exported,
    load_run,
    load_tokens,
    made_up,
    make,
    mutated,
    same,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def project(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make(ranks, tmp_path_factory.mktemp("project"))


def refusals(project: Project, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What each command that reads a run's checkpoint says of it; all must exit 2, without a trace."""
    said = []
    for command in (
        ("convert", project.run, project.folder / "target"),
        ("sample", project.run),
        ("train", project.settings),
        ("train", project.folder / "start.toml"),
    ):
        capfd.readouterr()
        assert exit_code(*command) == 2, command
        words = capfd.readouterr().err
        assert "Traceback" not in words
        # `train` first says what it is about to do.
        said.append(words[words.index("cubeloom: ") :])
        assert said[-1] == words or words.startswith("model  ")
    return said


def test_the_pickles_of_these_tests_would_execute(tmp_path: Path) -> None:
    for name, content in crafted(tmp_path / "executed").items():
        (tmp_path / "file").write_bytes(content)
        if name == "pickle":
            pickle.loads(content)
        else:
            torch.load(tmp_path / "file", weights_only=False)
        (tmp_path / "executed").rmdir()  # was made


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_a_checkpoint_of_the_earlier_format_is_refused_and_not_executed(
    project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """Its metadata was a pickle, as torch.distributed.checkpoint writes it."""
    here = project.copy(tmp_path / "project")
    checkpoint, manifest = here.checkpoint, read_manifest(here.checkpoint)
    for file in checkpoint.iterdir():
        file.unlink()
    for name in (".metadata", "__0_0.distcp"):
        (checkpoint / name).write_bytes(crafted(tmp_path / "executed")[kind])
    files = {file.name: checksum(file) for file in checkpoint.iterdir()}
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "format": 1, "files": files}))
    for said in refusals(here, capfd):
        assert f"{checkpoint} has format 1, of an earlier version, and this one reads 3" in said
    assert not (tmp_path / "executed").exists()


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
@pytest.mark.parametrize("name", ["manifest.json", "index.json", "rank-00000.safetensors"])
def test_a_pickle_in_the_place_of_a_file_is_refused_and_not_executed(
    project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    """With checksums that are right: whoever made it up can compute them."""
    here = project.copy(tmp_path / "project")
    checkpoint, manifest = here.checkpoint, read_manifest(here.checkpoint)
    (checkpoint / name).write_bytes(crafted(tmp_path / "executed")[kind])
    if name != "manifest.json":
        seal(checkpoint, manifest["step"], manifest["progress"], {"updates": 2.0, "optimizer": "AdamW"})
    commands = refusals(here, capfd) if name != "rank-00000.safetensors" else [_converted(here, capfd)]
    assert all("is damaged" in said for said in commands)
    assert not (tmp_path / "executed").exists()


def _converted(project: Project, capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert exit_code("convert", project.run, project.folder / "target") == 2
    return capfd.readouterr().err


def _mutate(project: Project, kind: Kind, good: object, draw: Random, mark: Path) -> str:
    """Damage a file of this kind, load, and put it back; what was found: refused, or as it was written."""
    files = sorted(kind.files(project))
    file = draw.choice(files)
    content = file.read_bytes()
    damaged = content
    while damaged == content:
        damaged = mutated(content, draw.choice(files).read_bytes(), draw, mark)
    try:
        file.write_bytes(damaged)
        found = kind.load(project)
    except UserError:
        return "refused"
    finally:
        file.write_bytes(content)
    assert not kind.checked or same(found, good), f"{file.name} was damaged, and something else was loaded"
    return "loaded"


def _mutate_many(project: Project, tmp_path: Path, times: int, seed: int) -> None:
    mark, found = tmp_path / "executed", Counter[tuple[str, str]]()
    for name, kind in KINDS.items():
        good = kind.load(project)
        for number in range(times // len(KINDS)):
            draw = Random(f"{seed} {name} {number}")
            try:
                found[name, _mutate(project, kind, good, draw, mark)] += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}, {name}, number {number}: {type(error).__name__}") from error
            assert not mark.exists(), f"seed {seed}, {name}, number {number}: it was executed"
    sys.stdout.write(f"{dict(found)}\n")
    assert {name for name, how in found if how == "refused"} == set(KINDS)


def _made_up(project: Project, times: int, seed: int) -> None:
    """JSON of the right form with wrong values in it, and checksums that are right: there may be no trace."""
    checkpoint = project.checkpoint
    for file, loads in (
        (checkpoint / "manifest.json", load_run),
        (checkpoint / "index.json", load_run),
        (project.tokens / "meta.json", load_tokens),
        (project.exported / "config.json", load_exported),
    ):
        for number in range(times // 4):
            draw = Random(f"{seed} {file.name} {number}")
            content, before = file.read_bytes(), {each: each.read_bytes() for each in file.parent.iterdir()}
            value = made_up(json.loads(content), draw)
            try:
                _write(project, file, value)
                with suppress(UserError):
                    loads(project)
            except Exception as error:
                raise AssertionError(f"seed {seed}, {file.name}, {number}: {value}") from error
            finally:
                for each, was in before.items():
                    each.write_bytes(was)


def _write(project: Project, file: Path, value: Any) -> None:
    """With the checksums that whoever made it up would write."""
    if isinstance(value, dict) and value.pop("checksum", None):
        write_sealed(file, value)
        return
    file.write_text(json.dumps(value))
    if file.name == "index.json":
        manifest = json.loads((file.parent / "manifest.json").read_text())
        manifest["files"][file.name] = checksum(file)
        _write(project, file.parent / "manifest.json", manifest)
    elif file.parent == project.exported:
        (file.parent / "checksums.json").unlink()  # a folder of somebody else has none


def test_made_up_values_are_refused_in_a_sentence(project: Project) -> None:
    _made_up(project, 100, seed=0)


@pytest.mark.long
def test_two_thousand_made_up_values(project: Project) -> None:
    _made_up(project, 2000, seed=1)


def test_damaged_files_are_refused_or_make_no_difference(project: Project, tmp_path: Path) -> None:
    _mutate_many(project, tmp_path, 300, seed=0)


@pytest.mark.long
def test_two_thousand_damaged_files(project: Project, tmp_path: Path) -> None:
    _mutate_many(project, tmp_path, 2004, seed=1)
