"""Ranks go on from what rank 0 decided, whatever each of them sees; and stop where they were given something else."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from jobs import job

from cubeloom import UserError
from cubeloom.base.file_errors import FilesFailed
from cubeloom.comm import CommunicationError
from cubeloom.launch import RankPool
from cubeloom.train import decision
from cubeloom.train.checkpoint import manifest
from cubeloom.train.job import Job
from cubeloom.train.loop import train
from cubeloom.train.metrics.log import read_log

pytestmark = pytest.mark.timeout(120)


def _train_with_a_stale_list(made: Job) -> None:
    """Rank 1 is shown a list of checkpoints that lacks the newest."""
    plain = manifest._folders
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(manifest, "_folders", lambda folder: plain(folder)[:-1])
        train(made)


def test_a_rank_with_a_stale_list_of_checkpoints_goes_on_from_rank_0_s(ranks: RankPool, tmp_path: Path) -> None:
    whole = job(tmp_path / "whole", "data=2")
    ranks.run(2, train, whole)
    halved = replace(whole, folder=tmp_path / "halved")
    ranks.run(2, train, replace(halved, steps=4, rate=replace(halved.rate, decay="constant")))
    ranks.run(2, _train_with_a_stale_list, replace(halved, rate=replace(halved.rate, decay="constant")))
    constant = replace(whole, folder=tmp_path / "constant", rate=replace(whole.rate, decay="constant"))
    ranks.run(2, train, constant)
    losses = [
        [record.loss for record in read_log(each.folder / "metrics.jsonl").records] for each in (halved, constant)
    ]
    assert losses[0] == losses[1]


def _train_as_given(jobs: list[Job]) -> None:
    train(jobs[dist.get_rank()])


def test_ranks_with_other_settings_stop_and_say_what_differs(ranks: RankPool, tmp_path: Path) -> None:
    made = job(tmp_path / "run", "data=2")
    said = r"rank 1 of 2 on .*: not what rank 0 trains: seed is 3, and 0 on rank 0; rate.peak is 0.5, and 0.01 on rank 0; give"
    with pytest.raises(UserError, match=said):
        ranks.run(2, _train_as_given, [made, replace(made, seed=3, rate=replace(made.rate, peak=0.5))])
    # On other grids they would not even meet.
    with pytest.raises(UserError, match=r"grid.data is 1, and 2 on rank 0; grid.x is 2, and 1 on rank 0"):
        ranks.run(2, _train_as_given, [made, replace(made, grid=job(tmp_path, "x=2").grid)])
    assert not made.folder.exists()


def _train_with_other_code(made: Job) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(decision, "code_versions", lambda: {"torch": "1.0"})
        train(made)


def test_ranks_with_another_torch_stop(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"rank 1 of 2 on .*: not what rank 0 trains: .*torch is 1.0, and 2\..* on rank 0"
    ):
        ranks.run(2, _train_with_other_code, job(tmp_path / "run", "data=2"))


def _train_where_rank_1_sees_late(made: Job, after: int, says: int = errno.ENOENT) -> None:
    plain = Path.stat
    looks: list[Path] = []

    def late(path: Path, **options: Any) -> Any:
        if path.name == "manifest.json" and len(looks) < after:
            looks.append(path)
            raise OSError(says, "not here", str(path))
        return plain(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Path, "stat", late)
        train(made)


@pytest.mark.slow
def test_a_rank_waits_until_it_sees_the_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    made = job(tmp_path / "run", "data=2", steps=2)
    ranks.run(2, train, made)
    longer = replace(made, steps=3)
    with pytest.raises(
        (FilesFailed, CommunicationError), match=r"step-00000002, which rank 0 chose, cannot be seen here"
    ):
        ranks.run(2, _train_where_rank_1_sees_late, longer, 1000)
    ranks.run(2, _train_where_rank_1_sees_late, longer, 2)
    assert read_log(made.folder / "metrics.jsonl").records[-1].step == 2


def test_attempts_are_counted_by_what_the_run_recorded(ranks: RankPool, tmp_path: Path) -> None:
    made = job(tmp_path / "run", "data=2", steps=2)
    for steps in (2, 3, 3, 4):  # the third trains nothing
        ranks.run(2, train, replace(made, steps=steps))
    began = [event for event in read_log(made.folder / "metrics.jsonl").events if event.name in ("start", "resume")]
    assert [(event.name, event.fields["attempt"], event.step) for event in began] == [
        ("start", 1, 0),
        ("resume", 2, 2),
        ("resume", 3, 3),
    ]


def test_a_run_that_lost_its_checkpoints_does_not_begin_anew_in_silence(ranks: RankPool, tmp_path: Path) -> None:
    made = job(tmp_path / "run", steps=6)
    ranks.run(1, train, made)
    before = (made.folder / "metrics.jsonl").read_text()
    made.checkpoints.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"metrics.jsonl tells of checkpoints, and this machine sees none in"):
        ranks.run(1, train, replace(made, steps=8))
    assert (made.folder / "metrics.jsonl").read_text() == before
