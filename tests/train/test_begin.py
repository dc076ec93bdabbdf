"""What a run's folder has is looked at before any process starts, and a refused command leaves it as it was."""

from __future__ import annotations

import fcntl
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job

from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.train import run_lock
from cubeloom.train.job import Job
from cubeloom.train.job.settings import OptimizerSettings
from cubeloom.train.loop import train
from cubeloom.train.run_lock import check_unlocked, locked
from cubeloom.train.start import begin

pytestmark = pytest.mark.timeout(120)


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.usefixtures("no_process")
def test_a_job_that_does_not_fit_its_folder_leaves_it_as_it_was(ranks: RankPool, tmp_path: Path) -> None:
    made = replace(job(tmp_path / "run"), steps=2)
    ranks.run(1, train, made)
    before = _files(tmp_path)
    longer = replace(made, steps=4)
    for changed, said in (
        (
            replace(longer, model=replace(longer.model, hidden=32)),
            r"another model: embed.weight is \[64, 16\], and here",
        ),
        (replace(longer, model=replace(longer.model, layers=3)), "of another model: it has no blocks.2"),
        (
            replace(longer, optimizer=OptimizerSettings(name="sgd")),
            "has the state of AdamW, and the optimizer here is SGD",
        ),
    ):
        with pytest.raises(UserError, match=said):
            begin(changed)
    start = replace(longer, folder=tmp_path / "new", model=replace(longer.model, hidden=32, start=tmp_path / "run"))
    with pytest.raises(UserError, match="is of another model"):
        begin(start)
    assert _files(tmp_path) == before


def _claim_and_train(folder: Path, other: Job) -> None:
    network = Network(Grid(x=2))
    with locked(folder, network):
        train(other)


@pytest.mark.usefixtures("no_process")
def test_two_trainings_do_not_share_a_folder(ranks: RankPool, tmp_path: Path) -> None:
    made = replace(job(tmp_path / "run", "x=2"), steps=2)
    said = r"folder = '.*run': process \d+ on .* is training there; wait for its end, or choose another folder"
    with pytest.raises(UserError, match=said):
        ranks.run(2, _claim_and_train, made.folder, made)
    check_unlocked(made.folder)  # the ranks are gone, and their claim with them
    ranks.run(2, _claim_and_train, tmp_path, made)
    with (made.folder / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match=said):
            begin(replace(made, steps=4))


def test_a_claim_of_another_machine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have died, and the file server not have noticed: a job that Slurm begins again must not fail for that."""
    lock = tmp_path / ".lock"
    lock.write_text("process 7 on a machine that died")
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(run_lock, "LEASE", 0.0)
        with pytest.raises(UserError, match="process 7 on a machine that died is training there"):
            check_unlocked(tmp_path)
        monkeypatch.setattr(run_lock, "LEASE", 60.0)
        noticed = threading.Timer(0.5, fcntl.flock, (file, fcntl.LOCK_UN))
        noticed.start()
        check_unlocked(tmp_path)
        noticed.join()
