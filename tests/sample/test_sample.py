"""Text from a run: the same for the same seed, from any directory, and of no other tokens than the tokenizer has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commands import exit_code
from cubeloom.launch import RankPool
from cubeloom.parallel import Batch
from cubeloom.train.data import Request, prepare
from cubeloom.train.job import Job
from cubeloom.train.job.settings import DataSettings, ModelSettings, RateSettings, Source
from cubeloom.train.loop import train

pytestmark = pytest.mark.timeout(120)


def _train(folder: Path, job: Job) -> None:
    """In a directory that the job's paths begin at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(job)


@pytest.fixture(scope="module")
def run(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on a text of three letters, on two ranks."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "text.txt").write_text("abc" * 1500)
    prepare(Request(inputs=(folder / "text.txt",)), folder / "tokens")
    job = Job(
        folder=Path("run"),
        steps=80,
        model=ModelSettings(preset="gpt-tiny", vocab=260, positions=16, hidden=32, layers=1, heads=2),
        batch=Batch(8, 16),
        data=DataSettings(sources=(Source(folder=Path("tokens")),)),
        rate=RateSettings(peak=1e-2, warmup=2),
    )
    ranks.run(2, _train, folder, replace(job, grid=replace(job.grid, y=2)))
    return folder / "run"


def sample(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return (exit_code("sample", *arguments), *capsys.readouterr())


@pytest.mark.slow
def test_the_likeliest_goes_on_as_the_text_did(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also beyond what the model can see at once, and in a directory that is not the training's."""
    code, text, _ = sample(capsys, str(run), "--prompt", "abca", "--tokens", "32", "--temperature", "0")
    assert (code, text) == (0, "abc" * 12 + "\n")


def test_a_seed_is_a_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [str(run), "--prompt", "ab", "--tokens", "40", "--temperature", "5", "--seed"]
    first, again, other = (sample(capsys, *asked, seed)[1] for seed in ("1", "1", "2"))
    assert first == again != other


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--tokens", "0"], "--tokens is at least 1"),
        (["--temperature", "-1"], "--temperature 0 or more"),
        (["--prompt", ""], "--prompt has at least one character"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], asked: list[str], said: str
) -> None:
    code, _, errors = sample(capsys, str(run), *asked)
    assert code == 2 and said in errors


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = sample(capsys, str(tmp_path))
    assert code == 2 and str(tmp_path) in errors
