"""`cubeloom train`: what cannot work gives one clear error, exits 2, starts no process and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commands import exit_code
from cubeloom.base.errors import UserError
from cubeloom.base.settings import load
from cubeloom.comm import devices
from cubeloom.launch import elastic
from cubeloom.train.job import Job, check
from scripts import run_cubeloom, start_cubeloom

FILE = """
steps = 3
dtype = "float64"
[model]
preset = "gpt-tiny"
[batch]
samples = 4
sequence = 8
[grid]
x = 2
[data]
sources = []
"""


Here = Callable[..., tuple[int, str, str]]


def cubeloom(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "cubeloom", *arguments, folder=folder, **variables)


def python(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Here:
    """The same in this process, which has imported torch already: exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        return (exit_code(*arguments), *capfd.readouterr())

    return call


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(FILE)
    return tmp_path / "job.toml"


@pytest.mark.slow
def test_a_file_trains_and_the_same_command_goes_on(file: Path) -> None:
    done = cubeloom("train", "job.toml", "--folder=run", "--json", folder=file.parent)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["steps"], told["why"], told["grid"]["x"]) == (3, "done", 2)
    assert load(Job, file.parent / "run" / "settings.toml") == load(Job, file, ["folder=run"])
    again = run_cubeloom("train", "job.toml", "--folder=run", "--steps=4", "--grid.x=1", folder=file.parent)
    assert "resuming at step 3" in again.stderr


@pytest.mark.slow
def test_torchrun_s_ranks_are_joined(file: Path) -> None:
    module = ["--nproc-per-node=2", "--standalone", "-m", "cubeloom", "train", "job.toml", "--folder=run"]
    done = python("-m", "torch.distributed.run", *module, folder=file.parent)
    assert done.returncode == 0, done.stderr
    assert (file.parent / "run" / "report.html").exists()


@pytest.mark.usefixtures("no_process")
def test_print_settings_prints_them_all_and_does_nothing(file: Path, here: Here) -> None:
    _, out, _ = here("train", "job.toml", "--print-settings", "--rate.peak=0.5")
    assert "peak = 0.5" in out
    assert sorted(each.name for each in file.parent.iterdir()) == ["job.toml"]


@pytest.mark.usefixtures("no_process", "file")
@pytest.mark.parametrize(
    ("gpus", "options", "ranks"),
    [
        (1, ["--device=cuda"], 1),
        (4, ["--device=cuda"], 4),
        (1, ["--device=cuda", "--share-gpu"], 2),
        (0, ["--device=cuda"], 2),
        (1, ["--device=cuda", "--ranks", "4"], 4),
        (1, [], 2),
    ],
)
def test_replan_takes_the_gpus_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: Here, gpus: int, options: list[str], ranks: int
) -> None:
    monkeypatch.setattr(devices, "count", lambda kind: gpus)
    _, out, _ = here("train", "job.toml", "--replan", "--print-settings", *options)
    (tmp_path / "fitted.toml").write_text(out)
    assert load(Job, tmp_path / "fitted.toml").grid.world == ranks


@pytest.mark.usefixtures("no_process", "file")
def test_replan_on_a_cluster_is_what_plan_finds_for_as_many_devices(tmp_path: Path, here: Here) -> None:
    """All else is the file's; no grid of seven devices has work for all, six do."""
    asked = ["job.toml", "--cluster", "perlmutter", "--rate.peak=0.5"]
    _, out, _ = here("train", *asked, "--dtype=float32", "--replan", "--ranks", "7", "--print-settings")
    (tmp_path / "replanned.toml").write_text(out)
    found = load(Job, tmp_path / "replanned.toml")
    here("plan", *asked, "--devices", "6", "--dtype", "fp32", "-o", "planned.toml")
    plan = load(Job, tmp_path / "planned.toml")
    assert (plan.device, found.device) == ("cuda", "cpu")  # the cluster's; where the job runs
    assert found == replace(plan, device="cpu")
    assert (found.grid.world, found.rate.peak) == (6, 0.5)


@pytest.mark.usefixtures("no_process", "file")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--cluster", "perlmutter"], "--ranks and --cluster are for --replan"),
        (["--ranks", "2"], "--ranks and --cluster are for --replan"),
        (
            ["--replan", "--ranks", "3", "--cluster", "perlmutter"],
            "dtype = 'float64': plans are for bfloat16 and float32",
        ),
        (["--replan", "--ranks", "3", "--cluster", "perlmuter", "--dtype=float32"], "perlmutter"),
    ],
)
def test_replan_says_what_it_cannot_plan(here: Here, options: list[str], told: str) -> None:
    code, _, errors = here("train", "job.toml", *options)
    assert code == 2 and told in errors


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("set_so", "told"),
    [
        ("--grid.x=7", "7"),
        ("--schedule.name=chimaera", "schedule.name = 'chimaera': unknown schedule; did you mean 'chimera'?"),
        ("--grid.x=1000000000", "has 1,000,000,000 ranks: at most 262,144"),
        ("--model.start=nowhere", "nowhere is not a checkpoint"),
        ("--model.start=job.toml", "job.toml is not a checkpoint of cubeloom: it is a file, not a folder"),
    ],
)
def test_one_clear_error(file: Path, here: Here, set_so: str, told: str) -> None:
    code, _, errors = here("train", "job.toml", set_so)
    assert code == 2 and told in errors
    assert "Traceback" not in errors and errors.splitlines()[-1].startswith("cubeloom: ")
    assert sorted(each.name for each in file.parent.iterdir()) == ["job.toml"]


@pytest.mark.usefixtures("no_process")
def test_more_ranks_than_this_machine_can_start(file: Path, here: Here) -> None:
    code, _, errors = here("train", "job.toml", "--grid.x=1", "--grid.data=5000", "--batch.samples=5000")
    assert code == 2 and "5,000 ranks are more than this machine can start" in errors
    assert sorted(each.name for each in file.parent.iterdir()) == ["job.toml"]


NAMES = st.sampled_from(
    ["steps", "dtype", "device", "folder", "grid.x", "grid.pipe", "grid.q", "model.preset", "model.heads"]
)
MORE = st.sampled_from(
    ["batch.samples", "schedule.name", "rate.decay", "data.sources", "optimizer.betas", "layout.ways", "nothing"]
)
VALUES = st.one_of(
    st.integers(-3, 50).map(str),
    st.floats(allow_nan=True).map(repr),
    st.text(max_size=8),
    st.sampled_from(
        [
            "true",
            "[]",
            "[1, 2]",
            '"chimera"',
            '"gpt-tiny"',
            '[{folder = "nowhere"}]',
            "{a = 1}",
            "1979-05-27",
            '"/proc/1/x"',
        ]
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(overrides=st.lists(st.tuples(st.one_of(NAMES, MORE), VALUES), min_size=1, max_size=3))
def test_whatever_is_set_either_works_or_is_refused(file: Path, overrides: list[tuple[str, str]]) -> None:
    """Nothing but a UserError, and nothing written."""
    before = sorted(each.name for each in file.parent.iterdir())
    try:
        check(load(Job, file, [f"--{name}={value}" for name, value in overrides]))
    except UserError as error:
        assert str(error)
    assert sorted(each.name for each in file.parent.iterdir()) == before


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_any_file_is_read_or_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "any.toml").write_bytes(text)
    try:
        load(Job, tmp_path / "any.toml")
    except UserError as error:
        assert "any.toml" in str(error)


@pytest.mark.usefixtures("file", "no_process")
def test_a_folder_that_cannot_be_written_to(here: Here) -> None:
    code, _, errors = here("train", "job.toml", "--folder=/proc/1/run")
    assert code == 2
    assert "cannot be written to" in errors


@pytest.mark.slow
def test_a_full_disk_ends_the_job_with_one_message_and_the_last_checkpoint(file: Path) -> None:
    """A limit on the size of files stands for a full disk: metrics fit below it, and the checkpoint does not."""
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from cubeloom.cli import main; main()"
    )
    done = python("-c", limited, "train", "job.toml", "--folder=run", "--restarts=1", folder=file.parent)
    assert done.returncode == 2, done.stderr
    assert "step-00000003 could not be written" in done.stderr
    assert not list((file.parent / "run" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("number", "to_a_rank"),
    [
        (signal.SIGTERM, False),
        (signal.SIGUSR1, False),
        (signal.SIGUSR1, True),
        pytest.param(signal.SIGHUP, False, marks=pytest.mark.long),
    ],
)
def test_a_signal_lets_the_step_end_and_keeps_it(file: Path, number: signal.Signals, to_a_rank: bool) -> None:
    job = start_cubeloom("train", "job.toml", "--folder=run", "--steps=2000", folder=file.parent)
    metrics = file.parent / "run" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert job.poll() is None
        time.sleep(0.05)
    ranks = json.loads(metrics.read_text().splitlines()[0])["processes"]
    os.kill(ranks[1] if to_a_rank else job.pid, number)
    done = job.done(60)
    assert done.returncode == 75, done.stderr
    assert "the same command resumes" in done.stderr and "Traceback" not in done.stderr
    (kept,) = (file.parent / "run" / "checkpoints").glob("step-*")
    assert int(kept.name.removeprefix("step-")) >= 2
    assert metrics.read_text().count('"resume"') == 0  # nobody began again


def _hang_up(_: Path, agent: int) -> str:
    os.kill(agent, signal.SIGHUP)
    time.sleep(0.5)
    return "done all the same"


@pytest.mark.slow
def test_a_job_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert elastic.start(1, 0, _hang_up, os.getpid()) == {0: "done all the same"}
    finally:
        signal.signal(signal.SIGHUP, before)


def _refused(refusals: Path, words: str) -> None:
    elastic.refused(refusals)
    error = UserError(words)
    elastic.refuse(refusals, error)
    raise error


def test_what_a_rank_is_refused_the_agent_says() -> None:
    numbers = (signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(each) for each in numbers]  # a shell's background job ignores SIGINT
    with pytest.raises(UserError, match="the disk is full"):
        elastic.start(1, 1, _refused, "the disk is full")
    assert [signal.getsignal(each) for each in numbers] == before  # the agent has let go of them
