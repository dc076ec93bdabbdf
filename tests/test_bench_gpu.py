"""`bench/gpu.py` runs everything it names, and what it compares trains alike. No time is asserted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench import overlap
from bench.gpu import (
    OUR_CUBES,
    OUR_SCHEDULES,
    PEER,
    RECIPES,
    One,
    main,
)
from bench.peers import gpt as peer
from bench.peers import schedules, sharded
from bench.peers.timing import Compared, Timed, slowest
from rich.console import Console

from cubeloom.comm import devices

pytestmark = pytest.mark.timeout(120)


def test_every_recipe_is_timed_and_trains_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["one", "--cpu", "--quick", "--recipes", *RECIPES]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    timed = {each["name"]: each for each in told["timed"]}
    assert set(timed) == set(RECIPES)
    assert all(min(each["steps_ms"]) > 0 for each in timed.values())
    for each in timed.values():
        assert each["loss"] == pytest.approx(timed[PEER]["loss"], abs=1e-5)


def told_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--cpu", "--quick"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


@pytest.mark.long
def test_pipelines_of_both_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = told_by(capsys, "pipe", "--ranks", "2")
    assert {each["name"] for each in told["timed"]} == {
        *schedules.RECIPES,
        *(f"cubeloom {each}" for each in OUR_SCHEDULES),
    }
    assert told["against"] in schedules.RECIPES


@pytest.mark.long
def test_tensor_parallelism_of_both_trains_alike(capsys: pytest.CaptureFixture[str]) -> None:
    for told, theirs, ours in zip(told_by(capsys, "tp", "--ranks", "2"), sharded.TENSOR, OUR_CUBES, strict=True):
        losses = {each["name"]: each["loss"] for each in told["timed"]}
        assert told["against"] == theirs and losses[ours] == pytest.approx(losses[theirs], abs=1e-5)


def test_what_is_hidden_is_a_share_of_the_shorter() -> None:
    """4 of 10 behind each other's matmuls; a step that computes for 8 takes 4 less in two strands."""
    ms = dict(zip(overlap.PAIR, (12.0, 10.0, 18.0), strict=True))
    ms |= {"one": 30.0, "two": 26.0, overlap.SUMS: 20.0, overlap.COMPUTING: 8.0}
    timed = [Timed(name, [each], None, 0.0) for name, each in ms.items()]
    assert overlap.hidden(timed, "one", "two") == {"pair": pytest.approx(0.4), "strands": pytest.approx(0.5)}


def test_the_slowest_rank_is_what_a_step_takes() -> None:
    (found,) = slowest([[Timed("a", [1.0, 5.0], None, 1.0)], [Timed("a", [3.0, 2.0], 0.5, 2.0)]])
    assert found == Timed("a", [3.0, 5.0], 0.5, 2.0)


def test_ratios_are_to_the_peer() -> None:
    mine, theirs = Timed("ours", [80.0, 70.0, 90.0], 1.0, 0.0), Timed(PEER, [100.0], 1.0, 0.0)
    compared = Compared("title", [mine, theirs], PEER, 1000, 1.0, 10.0)
    assert compared.ratio(mine) == 1.25 and compared.ratio(theirs) == 1.0
    assert compared.table().row_count == 2


@pytest.mark.parametrize("name", ["350M", "1.3B"])
def test_flops_are_megatrons(name: str) -> None:
    """The sum over the matmuls, three passes each: 2·rows·inputs·outputs, and attention in full."""
    size = {"350M": (24, 1024, 1024, 16), "1.3B": (24, 2048, 2048, 8)}[name]
    layers, hidden, sequence, samples = size
    tokens = samples * sequence
    block = 2 * tokens * (12 * hidden**2) + 4 * tokens * sequence * hidden
    expected = 3 * (layers * block + 2 * tokens * hidden * 50304) / 1e12
    chosen = peer.Size(layers=layers, hidden=hidden, heads=16, sequence=sequence, samples=samples)
    assert chosen.teraflops == pytest.approx(expected)


@pytest.mark.gpu
@pytest.mark.skipif(not devices.available("cuda"), reason="needs a CUDA device")
def test_every_recipe_on_a_gpu() -> None:
    (found,) = One(quick=True, recipes=RECIPES)(Console())
    assert [each.name for each in found.timed] == list(RECIPES)
    for each in found.timed:
        assert each.loss == pytest.approx(found.timed[0].loss, abs=2e-2)
