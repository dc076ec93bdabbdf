"""metrics.jsonl: each step once, through crashes and resumes; other sinks only where they are installed."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from cubeloom.base.errors import UserError
from cubeloom.train.job.settings import MetricsSettings
from cubeloom.train.metrics import Metrics, Record, check_sinks
from cubeloom.train.metrics.log import read_log

from .runs import lines, record

PLAIN = MetricsSettings()


def test_a_record_has_the_same_keys_always_and_comes_back() -> None:
    whole = record(3, mfu=0.4, skipped="loss is nan", validation=2.5)
    assert list(whole.as_json()) == [field.name for field in fields(Record)] == list(record(0).as_json())
    assert Record.from_json(json.loads(json.dumps(whole.as_json()))) == whole


def test_what_is_no_number_is_null_since_json_has_no_nan() -> None:
    values = record(1, loss=math.nan, gradient_norm=math.inf).as_json()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["loss"] is None and values["gradient_norm"] is None
    assert math.isnan(Record.from_json(values).loss)


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "new" / "run", PLAIN, 0)
    metrics.event("start", folder=tmp_path, loss=math.nan)
    metrics.write(record(0))
    # Nothing is closed: this is what a process that is killed leaves.
    start, step = lines(tmp_path / "new" / "run")
    assert start["event"] == "start" and start["folder"] == str(tmp_path) and start["loss"] is None
    assert start["time"] > 1.7e9
    assert step == record(0).as_json()
    metrics.close()
    metrics.close()  # once more does no harm


def test_a_resume_has_each_step_once_and_keeps_events(tmp_path: Path) -> None:
    with Metrics(tmp_path, PLAIN, 0) as metrics:
        metrics.event("start")
        for step in range(8):
            metrics.write(record(step, loss=100.0))
        metrics.event("skip", step=7)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(8).as_json())[:57])  # cut off by a crash
    with Metrics(tmp_path, PLAIN, 5) as metrics:
        metrics.event("resume", step=5)
        for step in range(5, 10):
            metrics.write(record(step))
    log = read_log(tmp_path / "metrics.jsonl")
    assert [each.step for each in log.records] == list(range(10))
    assert [each.loss for each in log.records] == [100.0] * 5 + [record(step).loss for step in range(5, 10)]
    assert [event.name for event in log.events] == ["start", "skip", "resume"]
    assert [event.step for event in log.events] == [None, 7, 5]
    assert log.unread == 0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_last_line_is_counted_and_no_more(tmp_path: Path) -> None:
    with Metrics(tmp_path, PLAIN, 0) as metrics:
        metrics.write(record(0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "loss": 3.')
    log = read_log(tmp_path / "metrics.jsonl")
    assert (len(log.records), log.unread) == (1, 1)


def test_a_last_line_that_lacks_only_its_end_is_whole(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(0).as_json()))
    with Metrics(tmp_path, PLAIN, 1) as metrics:
        metrics.write(record(1))
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


def test_the_file_stays_whole_when_forgetting_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Metrics(tmp_path, PLAIN, 0) as metrics:
        metrics.write(record(0))
    before = (tmp_path / "metrics.jsonl").read_text()

    def no_room(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_room)
    with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: the disk is full \(No space left"):
        Metrics(tmp_path, PLAIN, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_records_of_other_versions_stay(tmp_path: Path) -> None:
    """One that has a field more, one that lacks one with a default, and a line that only a later version can read."""
    file = tmp_path / "metrics.jsonl"
    newer, older = {**record(0).as_json(), "temperature": 71.5}, record(1).as_json()
    del older["validation"]
    strange = {"step": 2, "kind": "histogram"}
    file.write_text("".join(json.dumps(each) + "\n" for each in (newer, older, strange, {**newer, "step": 3})))
    assert [each.step for each in read_log(file).records] == [0, 1, 3]
    Metrics(tmp_path, PLAIN, 3).close()
    assert lines(tmp_path) == [newer, older, strange]


def test_a_line_is_written_once_through_errors_that_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = os.write, []

    def stale(file: int, data: bytes) -> int:
        calls.append(file)
        if len(calls) in (1, 3):
            raise OSError(errno.ESTALE, "Stale file handle")
        return plain(file, data[:20])  # a disk may also take less than it is given

    with Metrics(tmp_path, PLAIN, 0) as metrics:
        monkeypatch.setattr(os, "write", stale)
        metrics.write(record(0))
        monkeypatch.undo()
    assert lines(tmp_path) == [record(0).as_json()]


def test_every_keeps_some_steps_the_remarkable_ones_and_the_last(tmp_path: Path) -> None:
    with Metrics(tmp_path, MetricsSettings(every=4), 0) as metrics:
        for step in range(12):
            metrics.write(record(step, validation=3.0 if step == 5 else None, skipped="nan" if step == 6 else None))
    assert [line["step"] for line in lines(tmp_path)] == [0, 4, 5, 6, 8, 11]


def test_a_missing_package_names_the_extra_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cubeloom.train.metrics.sinks._installed", lambda name: False)
    check_sinks(PLAIN)
    for settings, extra in (
        (MetricsSettings(tensorboard=True), "tensorboard"),
        (MetricsSettings(wandb="mine"), "wandb"),
    ):
        with pytest.raises(UserError, match=rf"metrics.{extra} .* pip install 'cubeloom\[{extra}\]'"):
            check_sinks(settings)
        with pytest.raises(UserError):
            Metrics(tmp_path / "run", settings, 0)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_that_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="not installed"):
        check_sinks(MetricsSettings(wandb="mine"))


WANDB = """
calls = []

class Run:
    id = "abc"

    def log(self, values, step):
        calls.append((step, values))

    def finish(self):
        calls.append("finish")

def init(**options):
    calls.append(options)
    return Run()
"""


def test_weights_and_biases_gets_the_numbers_and_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.toml").write_text("steps = 4\n")
    for first in (0, 2):
        with Metrics(run, MetricsSettings(wandb="mine"), first) as metrics:
            metrics.write(record(first, loss=math.nan))
    calls = sys.modules["wandb"].calls
    monkeypatch.delitem(sys.modules, "wandb")
    assert [call["id"] for call in calls if isinstance(call, dict)] == [None, "abc"]
    assert calls[0]["project"] == "mine" and calls[0]["config"] == {"steps": 4}
    step, values = calls[4]
    assert step == 2 and values["tokens_per_s"] == 5120.0
    assert not {"loss", "mfu", "skipped", "step"} & values.keys()
    assert calls[-1] == "finish"


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with Metrics(tmp_path, MetricsSettings(tensorboard=True), 0) as metrics:
        for step in range(3):
            metrics.write(record(step))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = events.Scalars("loss")
    assert [each.step for each in found] == [0, 1, 2]
    assert [each.value for each in found] == pytest.approx([record(step).loss for step in range(3)])
