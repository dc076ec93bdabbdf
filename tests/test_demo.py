"""The examples run, and their two trainings are one."""

from __future__ import annotations

import builtins
import json
import keyword
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scripts import run_script

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_demo_prepares_trains_samples_and_leaves_a_report(tmp_path: Path) -> None:
    """As a person would start it."""
    few = ["--steps=4", "--rate.warmup=2", "--batch.sequence=16", "--model.layers=2"]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py", *few],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    assert "$ cubeloom sample runs/demo" in done.stdout
    assert "4 steps done" in done.stderr
    log = (tmp_path / "runs/demo/metrics.jsonl").read_text()
    losses = [json.loads(line).get("loss") for line in log.splitlines()]
    assert len([each for each in losses if each is not None]) == 4
    assert "chimera, measured" in (tmp_path / "runs/demo/report.html").read_text()


@pytest.mark.long
def test_the_demo_writes_words(tmp_path: Path) -> None:
    """At least half of what it writes. The dictionary: words that the training text has twice or more, and Python's own."""
    done = run_script(EXAMPLES / "demo.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "runs/demo.txt").read_text()
    known = {word for word, count in Counter(re.findall(r"[A-Za-z]+", text)).items() if count > 1}
    known |= {*keyword.kwlist, *dir(builtins)}
    written = re.findall(r"[A-Za-z]+", done.stdout.partition("$ cubeloom sample")[2].partition("runs/demo/report")[0])
    longer = [word for word in written if len(word) > 1]
    assert len(longer) > 30 and sum(word in known for word in longer) >= len(longer) / 2, longer


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What a short demo on the cube of eight tells."""
    done = run_script(EXAMPLES / "serial_and_cube.py", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_the_demo_trains_alike_serially_and_on_the_cube(told: dict[str, Any]) -> None:
    assert told["grid"]["losses"] == pytest.approx(told["serial"]["losses"], rel=1e-5)
    assert told["grid"]["losses"][-1] < told["grid"]["losses"][0]
    assert told["grid"]["received"] == told["predicted"]


def test_the_cube_cuts_the_demo_s_memory(told: dict[str, Any]) -> None:
    serial, rank = told["serial"]["memory"], told["grid"]["memory"]
    # Biases and norms are not cut over every axis, and in a model so small they weigh.
    for what in ("parameters", "gradients", "optimizer state"):
        assert 7.5 < serial[what] / rank[what] <= 8
    assert serial["activations at rest"] / rank["activations at rest"] == pytest.approx(8, rel=1e-3)


def test_the_demo_refuses_a_grid_that_cannot_work() -> None:
    done = run_script(EXAMPLES / "serial_and_cube.py", "--quick", "--grid", "x=7")
    assert done.returncode == 2
    assert "cannot be cut over x=7" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_of_one_s_own_is_cut() -> None:
    done = run_script(EXAMPLES / "cut_your_own_model.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("serial") == 10


def test_a_layer_of_one_s_own_in_one_file() -> None:
    done = run_script(EXAMPLES / "own_layer.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("serial") == 5 and "counted bytes are the predicted ones: True" in done.stdout


def test_a_model_of_somebody_else_s_is_trained() -> None:
    done = run_script(EXAMPLES / "any_model.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("serial") == 5
    assert "of the parameters are cut over every axis" in done.stdout
