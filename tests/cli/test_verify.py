"""The command as a person types it: exit codes, one clear message, no process started for what cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commands import exit_code
from cubeloom.cli.verify import Verify
from cubeloom.launch import RankPool
from cubeloom.models import build, config
from cubeloom.models.weights import save_weights
from cubeloom.parallel import initial_values, materialise
from scripts import run_cubeloom


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """To start one is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(RankPool, "_start", refuse)


def run(*arguments: str) -> int:
    return exit_code("verify", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "x=5"], "features 96 cannot be cut over x=5"),
        (["--grid", "w=2"], "unknown grid axis 'w'"),
        (["--grid", "x=two"], "x needs a whole number"),
        (["--grid", "pipe=3", "--schedule", "chimera"], "even"),
        (["--grid", "pipe=2", "--schedule", "chimaera"], "did you mean 'chimera'"),
        (["--grid", "pipe=2", "--schedule", "pipedream"], "can be compared on a model that ties no weights"),
        (["--grid", "y=2", "--ways", "3", "--batch", "4"], "cannot be cut into 3 strands"),
        (["--ways", "0"], "--ways must be from 1 to 16,777,216, got 0"),
        (["--ways", "1000000000"], "--ways must be from 1 to 16,777,216, got 1000000000"),
        (["--model", "unet-tiny", "--grid", "x=5"], "cannot be cut over x=5"),
        (["--model", "unet-tiny", "--layers", "3"], "has no number of layers to choose"),
        (["--model", "unet-tiny", "--vocab", "383"], "has no vocabulary to choose"),
        (["--kv-heads", "2"], "model gpt-tiny has no key-value heads to choose"),
        (["--model", "llama-tiny", "--kv-heads", "0"], "--kv-heads must be from 1 to 16,777,216, got 0"),
        (["--model", "llama-tiny", "--kv-heads", "5"], "5 key-value heads do not divide the number of heads 48"),
        (["--grid", "pipe=8"], "pieces cannot make 8 stages; at most 4"),
        (["--grid", "pipe=2", "--microbatches", "4", "--batch", "6"], "must be a multiple of 4"),
        (["--layers", "0"], "--layers must be from 1 to 2,000, got 0"),
        (["--grid", "data=5000"], "5,000 ranks are more than this machine can start"),
        (["--batch", "0"], "--batch must be from 1"),
        (["--patience", "-1"], "--patience must be above 0"),
        (["--patience", "nan"], "--patience must be above 0"),
        (["--placement", "x,y"], "a placement names each of"),
        (["--model", "gpt-tyni"], "did you mean 'gpt-tiny'"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--batch", "3"], "the batch of 3 samples cannot be cut over data=1·z=2"),
        (["--sequence", "65"], "sequences of 1 to 64 tokens"),
        (["--dropout", "1.5"], "--dropout must be at least 0 and below 1"),
        (["--model", "llama-tiny", "--dropout", "0.1"], "model llama-tiny has no dropout"),
        (["--grid", "x=2", "--microbatches", "4"], "--microbatches is for a pipeline"),
        (["--grid.x=2"], "--grid.x=2 is a setting of a file, and no FILE was given"),
        (["--load", "/nowhere.safetensors"], "no weights at /nowhere.safetensors"),
    ],
)
def test_what_cannot_work_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("cubeloom: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rest", "sharded"], "activations sharded between layers is for those that have one"),
        (["--inputs", "regathered"], "inputs that are gathered again is for"),
        (["--layers", "2"], "--layers is for presets"),
    ],
)
def test_what_a_traced_model_cannot_do_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = tmp_path / "net.py"
    file.write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(2, 2)\n", encoding="utf-8")
    assert run("--model", f"{file}:build", "--grid", "y=2", *arguments) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_leaves_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(self: Verify) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Verify, "__call__", interrupted)
    assert run() == 130
    assert capsys.readouterr().err == "cubeloom: interrupted\n"


@pytest.mark.parametrize("arguments", [["--rest", "halved"], ["--dtype", "int8"], ["--stpes", "3"]])
def test_unknown_options_and_values_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(*arguments) == 2


def weights_of(model: str, path: Path) -> Path:
    with torch.device("meta"):
        skeleton = build(config(model))
    save_weights(materialise(skeleton, initial_values(skeleton, 5, torch.float64)), path)
    return path


def test_a_checkpoint_of_another_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    foreign = weights_of("llama-tiny", tmp_path / "llama.safetensors")
    assert run("--load", str(foreign)) == 2
    said = capsys.readouterr().err
    assert "are of another model: the file lacks" in said
    assert "written from a Llama" in said
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(foreign.read_bytes()[:1000])
    assert run("--load", str(damaged)) == 2
    assert "is not a readable safetensors file" in capsys.readouterr().err


def test_a_real_run_agrees_and_ends_with_one_json_object(tmp_path: Path) -> None:
    weights = weights_of("gpt-tiny", tmp_path / "gpt.safetensors")
    done = run_cubeloom("verify", "--grid", "x=2,z=2", "--load", str(weights), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"] is True
    assert max(result["loss_diff"], result["grad_diff"], result["weight_diff"]) <= 1e-10
    assert result["counted_bytes"] == result["predicted_bytes"]
    assert set(result["counted_bytes"]) == {"x", "z", "z+x"}
    assert result["grid"] == {"pipe": 1, "data": 1, "z": 2, "y": 1, "x": 2}
    assert result["params_per_rank"] < 266_880 / 4 * 1.05
    assert 0.95 < result["cut_share"] < 1 and result["flops_share"] == 0.25


@pytest.mark.long
def test_a_compiled_run_agrees_and_leaves_nothing_behind() -> None:
    command = [sys.executable, "-m", "cubeloom", "verify", "--grid", "pipe=2", "--schedule", "zb-h1", "--compile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # the compiler's processes and semaphores are gone
