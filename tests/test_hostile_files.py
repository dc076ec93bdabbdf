"""Files that somebody damaged, or made up to harm whoever reads them: refused in a sentence, and nothing is executed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from commands import exit_code
from cubeloom.files import checksum
from cubeloom.launch import RankPool
from cubeloom.train.checkpoint import read_manifest, seal
from hostile import Project, crafted, make

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
        said.append(capfd.readouterr().err)
        assert "Traceback" not in said[-1] and said[-1].startswith("cubeloom: ")
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
        assert f"{checkpoint} has format 1, of an earlier version, and this one reads 2" in said
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
