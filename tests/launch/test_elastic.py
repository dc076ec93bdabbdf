"""The agent of a job's ranks, where one is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest.mock import patch

import pytest

from cubeloom.launch import elastic
from cubeloom.launch.gate import Gate


@pytest.mark.timeout(120)
def test_a_rank_killed_when_all_have_answered_is_begun_again(tmp_path: Path) -> None:
    """Setting an Event of multiprocessing waits for whoever sleeps in it: torch's agent would have waited forever."""
    killed: list[int] = []
    plain = Gate.set

    def kill_one_and_set(gate: Gate) -> None:
        if not killed:
            killed.append(int(next(tmp_path.iterdir()).name))
            os.kill(killed[0], signal.SIGKILL)
        plain(gate)

    with patch.object(Gate, "set", kill_one_and_set):
        answers = elastic.start(2, 1, _answer, tmp_path)
    begun = {int(file.name) for file in tmp_path.iterdir()}
    assert len(begun) == 4
    assert sorted(answers) == [0, 1] and set(answers.values()) < begun - set(killed)


@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert elastic.start(2, 1, _be_killed_once, tmp_path / "killed") == {0: None, 1: None}
    assert (
        capfd.readouterr().err == "rank 1 of 2: ended by signal 9 (Killed), as the system does where memory runs out\n"
    )


def _be_killed_once(_: elastic.Refusals, killed: Path) -> None:
    if os.environ["RANK"] == "1" and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _answer(_: elastic.Refusals, folder: Path) -> int:
    (folder / str(os.getpid())).touch()
    return os.getpid()
