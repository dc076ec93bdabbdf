"""A rank that cannot end itself is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cubeloom.launch import minder

pytestmark = pytest.mark.timeout(60)

# Without torch, which takes seconds to import. A rank that notes a SIGTERM, says so, and goes on for as long as it is told.
RANK = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(minder.__file__).parent)!r})
import minder
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
agent = os.getppid() if sys.argv[1] == "agent" else None
with minder.Minder("rank 1 of 2 on here", float(sys.argv[2]), agent, stopped=0.5):
    print(os.getpid(), flush=True)
    end = time.monotonic() + float(sys.argv[3])
    while time.monotonic() < end:
        time.sleep(0.05)
"""


def _start(agent: str, grace: float, lasts: float) -> tuple[subprocess.Popen[str], int]:
    words = [sys.executable, "-c", RANK, agent, str(grace), str(lasts)]
    rank = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    return rank, int(rank.stdout.readline())


def test_one_that_is_stuck_is_killed_after_its_grace() -> None:
    rank, process = _start("none", 1.0, 60)
    os.kill(process, signal.SIGTERM)
    out, errors = rank.communicate(timeout=20)
    assert rank.returncode == -signal.SIGKILL and out == "heard\n"
    assert errors == "rank 1 of 2 on here: killed, since it had not ended 1 s after a SIGTERM: it is stuck\n"


def test_one_that_is_stopped_is_killed_before_its_grace_is_over() -> None:
    rank, process = _start("none", 50.0, 60)
    os.kill(process, signal.SIGSTOP)
    time.sleep(1.0)
    assert rank.poll() is None  # a stop alone is no reason
    os.kill(process, signal.SIGTERM)
    _, errors = rank.communicate(timeout=20)
    assert rank.returncode == -signal.SIGKILL
    assert errors.endswith("s after a SIGTERM: it is stopped\n")


def test_one_that_ends_in_time_leaves_nothing() -> None:
    rank, process = _start("none", 30.0, 1.0)
    os.kill(process, signal.SIGTERM)
    out, errors = rank.communicate(timeout=20)  # until the minder has closed the pipe, too
    assert (rank.returncode, out, errors) == (0, "heard\n", "")


def test_one_whose_agent_dies_is_asked_to_stop(tmp_path: Path) -> None:
    """The shell is the agent: it starts the rank, and is killed."""
    (tmp_path / "rank.py").write_text(RANK)
    command = f"{sys.executable} {tmp_path / 'rank.py'} agent 30 2; true"
    agent = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    agent.stdout.readline()
    agent.kill()
    out, errors = agent.communicate(timeout=20)
    assert out == "heard\n"
    assert errors == "rank 1 of 2 on here: asked to stop, since the agent that started it is gone\n"
