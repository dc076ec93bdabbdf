"""The agent of a job's ranks, where a rank dies at the very end."""

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


def _answer(_: elastic.Refusals, folder: Path) -> int:
    (folder / str(os.getpid())).touch()
    return os.getpid()
