"""What a user is told in the first hour: each message says what to do (`Messages` of the issue on the first hour)."""

from __future__ import annotations

import io
import logging
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console

from commands import exit_code
from cubeloom import Grid, UserError
from cubeloom.base.settings import load
from cubeloom.comm import Network, world
from cubeloom.launch import elastic
from cubeloom.train import start
from cubeloom.train.job import Job, check
from cubeloom.train.metrics.progress import _narrow

FILE = """
steps = 2
[batch]
samples = 4
sequence = 16
[data]
sources = [{ folder = "tokens" }]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(FILE)
    return tmp_path


def prepared(text: str, *options: object) -> None:
    Path("a.txt").write_text(text)
    assert exit_code("data", "prepare", "a.txt", "-o", "tokens", *options) == 0


def refusal(capfd: pytest.CaptureFixture[str], *words: object) -> str:
    capfd.readouterr()
    assert exit_code(*words) == 2
    return capfd.readouterr().err.splitlines()[-1]


def test_tokens_that_are_missing(capfd: pytest.CaptureFixture[str]) -> None:
    assert "`cubeloom data prepare TEXT... -o tokens` writes one" in refusal(capfd, "train", "job.toml")


def test_too_little_text(capfd: pytest.CaptureFixture[str]) -> None:
    prepared("twelve bytes", "--validation", 0)
    told = refusal(capfd, "train", "job.toml")
    assert (
        "13 tokens for training: too few for a sequence of 16; set batch.sequence to 12 or less, or prepare more"
        in told
    )


def test_too_little_validation(capfd: pytest.CaptureFixture[str]) -> None:
    prepared("a text of more than a hundred bytes " * 4, "--validation", 0)
    told = refusal(capfd, "train", "job.toml", "--evaluation.every", 1)
    assert "0 tokens for validation" in told and "(--validation 0.1 --force), or leave out evaluation.every" in told


def test_little_validation_is_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    prepared("a text " * 500, "--validation", "0.1")
    told = capfd.readouterr().out
    assert "WARNING: validation has 350 of 3,501 tokens" in told and "--validation 0.1 --force" in told
    prepared("a text " * 500, "--validation", 0, "--force")
    assert "WARNING" not in capfd.readouterr().out


def test_the_bytes_tokenizer_trains_on_any_axis() -> None:
    """Its 257 tokens are padded."""
    prepared("a text " * 50)
    check(load(Job, Path("job.toml"), ["grid.y=2"]))


@pytest.mark.parametrize("command", ["sample", "report", "evaluate"])
def test_a_file_is_no_run(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    told = refusal(capfd, command, "job.toml")
    assert told == (
        "cubeloom: job.toml is a file, and a run is a folder: give the `folder` of its settings, such as runs/quick"
    )
    assert "there is no folder nowhere: `cubeloom train FILE` writes a run" in refusal(capfd, command, "nowhere")


def test_a_number_of_devices_on_which_nothing_runs(capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "gpt2", "--cluster", "perlmutter", "--devices", 29, "--global-batch", 64]
    assert exit_code("plan", *asked) == 1
    assert "none can run on 29 devices: the nearest numbers that work are 32 and 24" in capfd.readouterr().out


def test_a_port_that_is_taken() -> None:
    with socket.create_server((world.LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of this machine: Address already in use; .* MASTER_PORT"):
            world.host(port)


def test_a_network_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(UserError, match=r"`cubeloom.init\(y=2, x=2\)` makes one of the ranks that torchrun"):
        Network(Grid(x=2, y=2))


def test_only_rank_0_of_a_wrong_number_of_ranks_speaks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prepared("a text " * 50)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(start, "_end", end)
    monkeypatch.setenv("RANK", "0")
    assert "the grid x=1 needs 1 rank, and torchrun started 2" in refusal(capfd, "train", "job.toml")
    monkeypatch.setenv("RANK", "1")
    assert exit_code("train", "job.toml") == 2 and ended == [2]
    assert capfd.readouterr().err == ""


def test_torch_does_not_tell_of_signals() -> None:
    elastic._silence_torch()
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic.")]
    assert "torch.distributed.elastic.agent.server.api" in names
    assert not any(logging.getLogger(name).isEnabledFor(logging.WARNING) for name in names)


def test_a_terminal_has_room_for_ctrl_c_behind_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    assert Console(file=stream).width == 80
    assert _narrow(stream).width <= 80 - len("^C")
