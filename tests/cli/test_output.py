"""What a command prints, where it can and where it cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import IO

import pytest

from commands import exit_code
from cubeloom.cli import COMMANDS


def cubeloom(*arguments: str, to: int | IO[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cubeloom", *arguments]
    return subprocess.run(command, stdout=to, stderr=subprocess.PIPE, text=True, timeout=60)


def test_the_version() -> None:
    done = cubeloom("--version", to=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cubeloom {version('cubeloom')}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("models",), ("--version",), ("plan", "--help")])
def test_a_full_disk_is_told_in_one_sentence(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = cubeloom(*arguments, to=full)
    assert (done.returncode, done.stderr) == (2, "cubeloom: the output cannot be written: No space left on device\n")


def test_who_has_read_enough_is_told_nothing() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed:
        done = cubeloom("--version", to=closed)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_no_command_is_a_question_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code() == 0
    told = capsys.readouterr().out
    assert "usage: cubeloom" in told and all(name in told for name in COMMANDS)
