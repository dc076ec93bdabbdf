"""A training on a stream goes on where it stopped, on any grid, and is evaluated on documents that it does not train on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import MODEL, job

from cubeloom import Grid, UserError
from cubeloom.base.settings import load, write
from cubeloom.launch import RankPool
from cubeloom.tools.evaluate import Evaluation, evaluate
from cubeloom.train.checkpoint import read_manifest
from cubeloom.train.data import chunks
from cubeloom.train.data.kept_tokenizer import kept
from cubeloom.train.job import Job, check
from cubeloom.train.job.settings import CheckpointSettings, DataSettings, EvaluationSettings, Source
from cubeloom.train.loop import train
from cubeloom.train.metrics.log import read_log

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def what(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("streams")
    (folder / "texts").mkdir()
    rows = [{"prompt": "abc"[n % 3] * (2 + n % 9), "completion": "xyz"[n % 3] * (3 + n % 5)} for n in range(200)]
    for name, part in (("a", rows[:80]), ("b", rows[80:])):
        (folder / "texts" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    source = Source(stream=str(folder / "texts"), validation=0.2)
    return job(
        folder / "run",
        steps=6,
        microbatches=2,
        model=replace(MODEL, vocab=None),
        data=DataSettings(sources=(source,), packing=True),
        checkpoint=CheckpointSettings(every=2, keep=9, best=False),
        evaluation=EvaluationSettings(every=3, batches=2),
    )


def _train(what: Job) -> None:
    """In chunks of a few documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", 400)
        train(what)


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(ranks: RankPool, what: Job, tmp_path: Path) -> None:
    ranks.run(1, _train, what)
    shutil.copytree(what.folder, tmp_path / "run")
    for step in (6, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    progress = read_manifest(tmp_path / "run" / "checkpoints" / "step-00000002")["progress"]
    assert progress["position"] == 16 and 0 < progress["stream"]["number"] <= 16
    resumed = replace(what, folder=tmp_path / "run", grid=Grid(z=2, y=2))
    ranks.run(4, _train, resumed)
    ours, theirs = (read_log(each.folder / "metrics.jsonl").records for each in (resumed, what))
    assert [each.loss for each in ours] == pytest.approx([each.loss for each in theirs], rel=1e-10)
    assert ours[-1].validation == pytest.approx(theirs[-1].validation, rel=1e-10)
    run = lambda count, function, work, timeout: ranks.run(count, function, work)  # noqa: E731
    found = evaluate(Evaluation(given=what.folder, batches=2), run)
    assert found is not None and found.loss == pytest.approx(theirs[-1].validation, rel=1e-10)
    tokenizer = kept(what.folder)
    assert tokenizer is not None and tokenizer.vocabulary == what.source().vocabulary == 257


def test_settings_name_a_stream(what: Job, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(write(what))
    assert load(Job, tmp_path / "job.toml") == what
    check(what)
    (source,) = what.data.sources
    with pytest.raises(UserError, match=r"has no documents for validation; validation = 0.01 keeps"):
        check(replace(what, data=DataSettings(sources=(replace(source, validation=None),))))
    with pytest.raises(UserError, match="has a vocabulary of 257, and the model one of 100"):
        check(replace(what, model=replace(what.model, vocab=100)))
