"""MPS is started for one job, in places of its own, and ended with it. A stand-in for it writes down how it is called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cubeloom.comm import devices
from cubeloom.launch.share_gpu import CONTROL, sharing


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in writes: its arguments or what it was told, and its folders."""
    program, written = tmp_path / CONTROL, tmp_path / "calls"
    program.write_text(
        f'#!/bin/sh\necho "${{1:-$(cat)}} $CUDA_MPS_PIPE_DIRECTORY" >> {written}\nexit ${{MPS_FAILS:-0}}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    have(monkeypatch, 1)
    return written


def have(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(devices, "count", lambda kind: gpus)


def test_it_is_started_and_ended_and_leaves_nothing(calls: Path) -> None:
    before = dict(os.environ)
    with sharing(4, "cuda") as helped:
        assert helped
        folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir()
        assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert calls.read_text().splitlines() == [f"-d {folder}", f"quit -t 10 {folder}"]
    assert dict(os.environ) == before
    assert not folder.exists()


def test_it_is_ended_when_the_job_fails(calls: Path) -> None:
    with pytest.raises(ZeroDivisionError), sharing(2, "cuda"):
        raise ZeroDivisionError
    assert calls.read_text().splitlines()[-1].startswith("quit")


def test_it_is_ended_when_the_process_is_asked_to_end(calls: Path) -> None:
    lines = (
        "import time",
        "from cubeloom.comm import devices",
        "from cubeloom.launch.share_gpu import sharing",
        "devices.count = lambda kind: 1",
    )
    program = "\n".join((*lines, "with sharing(2, 'cuda'): print(1, flush=True); time.sleep(60)"))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.terminate()
    process.communicate(timeout=30)
    started, ended = calls.read_text().splitlines()
    assert process.returncode == 143
    assert started.startswith("-d") and ended.startswith("quit")
    assert not Path(started.split()[1]).exists()


def test_where_it_does_not_start_ranks_share_all_the_same(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPS_FAILS", "1")
    before = dict(os.environ)
    with sharing(2, "cuda") as helped:
        assert not helped
    assert len(calls.read_text().splitlines()) == 1  # and is not ended
    assert dict(os.environ) == before


def test_a_gpu_for_each_rank_needs_none(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with sharing(2, "cpu") as helped:
        assert not helped
    have(monkeypatch, 2)
    with sharing(2, "cuda") as helped:
        assert not helped
    assert not calls.exists()
    assert not capsys.readouterr().err


def test_more_than_four_ranks_of_a_gpu_take_turns(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their parts of it would be too small for products that run in clusters, and could hang."""
    with sharing(8, "cuda") as helped:
        assert not helped
    assert not calls.exists()
    assert capsys.readouterr().err == "the ranks of a GPU take turns: side by side more than 4 can hang\n"
    have(monkeypatch, 2)
    with sharing(8, "cuda") as helped:
        assert helped


def test_ranks_that_take_turns_do_not_meet_an_mps_that_runs(calls: Path) -> None:
    """Neither one that the user started nor that of a smaller job."""
    with sharing(4, "cuda"), sharing(8, "cuda"):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] not in calls.read_text()


def test_an_mps_is_ended_also_where_its_variables_are_gone(calls: Path) -> None:
    with sharing(4, "cuda"):
        folder = os.environ.pop("CUDA_MPS_PIPE_DIRECTORY")
    assert calls.read_text().splitlines() == [f"-d {folder}", f"quit -t 10 {folder}"]


def test_ranks_that_share_a_gpu_say_so_to_nccl() -> None:
    """Each is a host of its own; ranks with a GPU each are left alone."""
    first, second = (devices.wiring("cuda", rank, shared=True) for rank in range(2))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    alone = devices.wiring("cuda", 0, shared=False)
    assert alone == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
