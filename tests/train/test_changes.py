"""A run that goes on says what is different; one that trains nothing leaves all as it was."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import job

from cubeloom import UserError
from cubeloom.base.grid import Grid
from cubeloom.launch import RankPool
from cubeloom.train import metrics_logger, trainer
from cubeloom.train.checkpoint import load_checkpoint
from cubeloom.train.data import Request, prepare
from cubeloom.train.job import Job, check
from cubeloom.train.job.settings import DataSettings, EvaluationSettings, Source
from cubeloom.train.loop import Ended, train
from cubeloom.train.metrics import write_report
from cubeloom.train.metrics.log import read_log
from cubeloom.train.start import begin

pytestmark = pytest.mark.timeout(120)


def _files(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def _tokens(folder: Path, text: str) -> Path:
    folder.parent.mkdir(exist_ok=True)
    (folder.parent / "text.txt").write_text(text)
    return prepare(Request(inputs=(folder.parent / "text.txt",)), folder, force=True).file.folder


def test_what_changed_is_an_event_and_the_report_has_each_grid(ranks: RankPool, tmp_path: Path) -> None:
    data = DataSettings(sources=(Source(folder=_tokens(tmp_path / "tokens", "a" * 4000)),))
    made = replace(job(tmp_path / "run"), steps=2, data=data)
    made = replace(made, model=replace(made.model, vocab=258))
    ranks.run(1, train, made)
    ranks.run(1, train, replace(made, steps=3))
    _tokens(tmp_path / "tokens", "b" * 4000)
    ranks.run(2, train, replace(made, steps=4, grid=Grid(x=2), seed=5))
    events = [event for event in read_log(made.folder / "metrics.jsonl").events if event.name == "change"]
    assert dict(events[0].fields) == {"steps": "2 → 3", "step": 2}
    assert {"seed", "grid.x", "steps", "data", "step"} == set(events[1].fields)
    assert events[1].fields["seed"] == "0 → 5" and events[1].fields["grid.x"] == "1 → 2"
    page = write_report(made.folder).read_text()
    assert "x=1 from step 0 (attempt 1); x=2 from step 3 (attempt 3)" in page


@pytest.mark.usefixtures("no_process")
def test_a_command_that_trains_nothing_changes_no_file(ranks: RankPool, tmp_path: Path) -> None:
    made = replace(job(tmp_path / "run"), steps=2)
    ranks.run(1, train, made)
    before = _files(tmp_path)
    other = replace(made, seed=7)
    assert begin(made) == begin(other) == Ended(2, "done", None)
    assert ranks.run(1, train, other) == [Ended(2, "done", None)]  # as under torchrun
    with pytest.raises(UserError):
        begin(replace(made, steps=5, model=replace(made.model, hidden=32)))
    assert _files(tmp_path) == before


def test_validation_is_not_counted_twice_in_silence(tmp_path: Path) -> None:
    """9 sequences of 8 tokens, where 2 batches of 8 are asked for."""
    tokens = _tokens(tmp_path / "tokens", "a" * 7999)
    made = job(tmp_path / "run", data=DataSettings(sources=(Source(folder=tokens),)))
    made = replace(made, model=replace(made.model, vocab=258))
    check(replace(made, evaluation=EvaluationSettings(every=1, batches=1)))
    said = "evaluation.batches = 2 needs 16 samples of .*tokens, which has 9 samples of 8 tokens for validation: "
    with pytest.raises(
        UserError, match=f"{said}evaluation.batches = 1 would do; or prepare it with a larger --validation"
    ):
        check(replace(made, evaluation=EvaluationSettings(every=1, batches=2)))


def _train_and_be_asked_while_loading(made: Job) -> Ended:
    plain = load_checkpoint

    def load(*arguments: object) -> object:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*arguments)  # type: ignore[arg-type]

    assert threading.current_thread() is threading.main_thread()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "load_checkpoint", load)
        return train(made)


def test_a_signal_while_a_checkpoint_loads_stops_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    made = replace(job(tmp_path / "run", "data=2"), steps=2)
    ranks.run(2, train, made)
    before = read_log(made.folder / "metrics.jsonl")
    asked = ranks.run(2, _train_and_be_asked_while_loading, replace(made, steps=4))
    assert [(each.steps, each.why, each.loss) for each in asked] == [(2, "asked to stop", None)] * 2
    assert asked[0].asked[0].startswith("rank 1 of 2 on ") and len(asked[0].asked) == 1
    assert read_log(made.folder / "metrics.jsonl") == before


def _train_without_a_report(made: Job) -> Ended:
    def fail(_: Path) -> None:
        raise UserError("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_logger, "write_report", fail)
        return train(made)


def test_a_page_that_cannot_be_written_is_no_reason_to_fail(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, _train_without_a_report, replace(job(tmp_path / "run"), steps=2))[0].why == "done"
