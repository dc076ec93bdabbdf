"""The best checkpoint outlives newer ones, and a checkpoint is evaluated as the training evaluated it, on any grid."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import MODEL, job

from commands import exit_code
from cubeloom import Grid, UserError
from cubeloom.launch import RankPool
from cubeloom.tools.evaluate import Evaluated, Evaluation, evaluate
from cubeloom.train.checkpoint import best, checkpoints
from cubeloom.train.data import Request, prepare
from cubeloom.train.job import Job
from cubeloom.train.job.settings import CheckpointSettings, DataSettings, EvaluationSettings, RateSettings, Source
from cubeloom.train.loop import train
from cubeloom.train.metrics.log import Log, read_log
from cubeloom.train.trainer import Trainer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations whose answers make a small part of what is said, and another part in each."""
    folder = tmp_path_factory.mktemp("chat")
    rows = [{"question": "abc"[n % 3] * (1 + n % 7), "answer": "xyz"[n % 3] * (1 + n % 5)} for n in range(60)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(Request(inputs=(folder / "chat.jsonl",), validation=0.3), folder / "tokens")
    return folder / "tokens"


def _train_with(losses: list[float], what: Job) -> None:
    """As if validation had these losses."""
    given = iter(losses)

    def evaluate(self: Trainer) -> float:
        return next(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", evaluate)
        train(what)


def _job(folder: Path, **changes: Any) -> Job:
    every = EvaluationSettings(every=1, batches=1)
    made = job(folder, steps=6, microbatches=1, evaluation=every, checkpoint=CheckpointSettings(every=2, keep=1))
    return replace(made, **changes)


def _steps(folder: Path) -> list[int]:
    return [int(each.name.removeprefix("step-")) for each in checkpoints(folder / "checkpoints")]


def _log(folder: Path) -> Log:
    return read_log(folder / "metrics.jsonl")


@pytest.mark.slow
def test_the_best_is_kept_beside_the_newest_and_named(ranks: RankPool, tmp_path: Path) -> None:
    what = _job(tmp_path / "run")
    ranks.run(1, _train_with, [3.0, 2.0, 1.0, 2.0, 1.5, 4.0], what)
    assert _steps(what.folder) == [3, 6]
    assert best(what.folder) == what.checkpoints / "step-00000003"
    named = [(event.step, event.fields["validation"]) for event in _log(what.folder).events if event.name == "best"]
    assert named == [(1, 3.0), (2, 2.0), (3, 1.0)]
    # Who goes on knows it, and gives it up for a better one alone.
    ranks.run(1, _train_with, [5.0, 0.5, 6.0, 6.0], replace(what, steps=10))
    assert _steps(what.folder) == [8, 10]
    assert best(what.folder) == what.checkpoints / "step-00000008"


def test_without_it_only_the_newest_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    what = _job(tmp_path / "run", checkpoint=CheckpointSettings(every=2, keep=1, best=False, asynchronous=False))
    ranks.run(1, _train_with, [3.0, 2.0, 1.0, 2.0, 1.5, 4.0], what)
    assert _steps(what.folder) == [6] and best(what.folder) is None
    with pytest.raises(UserError, match=r"has no best checkpoint: set evaluation\.every"):
        evaluate(Evaluation(given=what.folder, best=True))


@pytest.fixture(scope="module")
def trained(ranks: RankPool, chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """On answers alone. In a batch of validation each rank of z has another number of them."""
    what = job(
        tmp_path_factory.mktemp("trained") / "run",
        "z=2",
        microbatches=2,
        model=replace(MODEL, vocab=None),
        data=DataSettings(sources=(Source(folder=chat),)),
        evaluation=EvaluationSettings(every=3, batches=3),
        checkpoint=CheckpointSettings(every=2),
        rate=RateSettings(peak=1e-2),
    )
    ranks.run(2, train, what)
    return what


def pool(ranks: RankPool) -> Callable[..., list[Any]]:
    def run(count: int, function: Callable[..., Any], *arguments: Any, timeout: float) -> list[Any]:
        return ranks.run(count, function, *arguments, timeout=60)

    return run


def found(ranks: RankPool, **asked: Any) -> Evaluated:
    made = evaluate(Evaluation(**asked), pool(ranks))
    assert made is not None
    return made


def test_the_vocabulary_is_the_datas(trained: Job) -> None:
    assert trained.source().vocabulary == 257
    rounded = replace(trained, data=replace(trained.data, vocab_multiple=64))
    assert rounded.source().vocabulary == 320
    assert replace(rounded, model=replace(trained.model, vocab=300)).source().vocabulary == 300


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["x=1", pytest.param("pipe=2,y=2", marks=pytest.mark.long)])
def test_answers_alone_are_learned_alike_on_every_grid(
    ranks: RankPool, trained: Job, tmp_path: Path, grid: str
) -> None:
    """The mean is over the answers of the whole batch, wherever they are in it."""
    other = replace(trained, folder=tmp_path, grid=Grid.parse(grid))
    ranks.run(other.grid.world, train, other)
    for mine, theirs in zip(_log(tmp_path).records, _log(trained.folder).records, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-10)
        assert mine.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-10)
        assert (mine.validation or 0) == pytest.approx(theirs.validation or 0, rel=1e-10)


def test_the_command_gives_what_training_saw(ranks: RankPool, trained: Job) -> None:
    last = _log(trained.folder).records[-1].validation
    before = {file: file.stat().st_mtime_ns for file in trained.folder.rglob("*")}
    newest = found(ranks, given=trained.folder, batches=3)
    assert newest.loss == pytest.approx(last, rel=1e-12) and newest.step == 6
    assert {file: file.stat().st_mtime_ns for file in trained.folder.rglob("*")} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid", ["x=1", "pipe=2,x=2", *(pytest.param(grid, marks=pytest.mark.long) for grid in ("z=2,y=2", "data=3"))]
)
def test_every_grid_gives_the_same_loss_on_all_there_is(ranks: RankPool, trained: Job, grid: str) -> None:
    """Also where the last batch is not full, and ranks and micro-batches have other numbers of targets."""
    whole = found(ranks, given=trained.folder)
    assert whole.samples % 8 and whole.targets < whole.samples * 8 / 2
    other = found(ranks, given=trained.checkpoints / "step-00000006", grid=Grid.parse(grid))
    assert other.loss == pytest.approx(whole.loss, rel=1e-12)
    assert (other.targets, other.samples) == (whole.targets, whole.samples)


def test_other_data(ranks: RankPool, trained: Job, chat: Path, tmp_path: Path) -> None:
    """A folder without a part for validation is evaluated as a whole."""
    same = found(ranks, given=trained.folder, data=chat)
    assert same.loss == pytest.approx(found(ranks, given=trained.folder).loss, rel=1e-12)
    (tmp_path / "held.txt").write_text("abc" * 50)
    held = prepare(Request(inputs=(tmp_path / "held.txt",), validation=0), tmp_path / "held").file.folder
    assert found(ranks, given=trained.folder, data=held, sequence=5).targets == 150


def test_what_cannot_be_evaluated(trained: Job, chat: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for asked, said in (
        ([tmp_path], "is neither a run nor a checkpoint"),
        ([tmp_path / "nowhere"], "no folder"),
        ([trained.checkpoints / "step-00000006", "--best"], "--best is for a run"),
        ([trained.folder, "--batches", 999], "--batches 999: there are"),
        ([trained.folder, "--batches", 0], "--batches must be"),
        ([trained.folder, "--sequence", 9], "a sequence of 9 is more than the 8 that the model takes"),
        ([trained.folder, "--grid", "x=3"], "grids that work: "),
        ([trained.folder, "--data", tmp_path], "is not a folder of tokens"),
    ):
        assert exit_code("evaluate", *asked) == 2
        assert said in capfd.readouterr().err, asked


@pytest.mark.slow
def test_the_command_starts_its_ranks(ranks: RankPool, trained: Job, capfd: pytest.CaptureFixture[str]) -> None:
    assert exit_code("evaluate", trained.folder, "--best", "--json") == 0
    out = capfd.readouterr().out.splitlines()
    told = json.loads(out[-1])
    best_one = found(ranks, given=trained.folder, best=True)
    assert (told["loss"], told["step"]) == (pytest.approx(best_one.loss), best_one.step)
    assert f"perplexity {best_one.perplexity:.5g}" in out[0]
