"""`bench/gpu.py` runs everything it names, and what it compares trains alike. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import overlap, traced
from bench.gpu import (
    LLAMAS,
    OUR_CUBES,
    OUR_SCHEDULES,
    PEER,
    RECIPES,
    TINY,
    One,
    main,
)
from bench.one import CHOSEN, TRAINED, measure_one
from bench.peers import gpt as peer
from bench.peers import schedules, sharded
from bench.peers.llama import Llama
from bench.peers.timing import Compared, Timed, slowest
from rich.console import Console

from cubeloom import UserError
from cubeloom.comm import devices
from cubeloom.launch import RankPool

pytestmark = pytest.mark.timeout(120)


@pytest.mark.long
@pytest.mark.parametrize("size", ["350M", "llama-1B"])
def test_every_recipe_is_timed_and_trains_alike(capsys: pytest.CaptureFixture[str], size: str) -> None:
    assert main(["one", "--cpu", "--quick", "--sizes", size, "--recipes", *RECIPES]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    timed = {each["name"]: each for each in told["timed"]}
    assert set(timed) == set(RECIPES)
    assert all(min(each["steps_ms"]) > 0 for each in timed.values())
    for each in timed.values():
        assert each["loss"] == pytest.approx(timed[PEER]["loss"], abs=1e-5)


@pytest.mark.long
def test_recipes_whose_packages_need_a_gpu_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["one", "--cpu", "--quick", "--profile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "left out: torch, compiled blocks, Liger, which needs a GPU" in lines
    assert {each["name"] for each in json.loads(lines[-1])["timed"]} == {*RECIPES} & {*CHOSEN}


def test_a_recipe_whose_packages_fail_is_left_out(ranks: RankPool) -> None:
    """As with a torch that is too new for them; here there is no GPU, or no package."""
    liger = "torch, compiled blocks, Liger"
    (found,) = ranks.run(1, measure_one, "tiny", TINY, devices.CPU, (PEER, liger), 1, 1, False, False)
    assert [each.name for each in found.timed] == [PEER]
    assert [each.partition(": ")[0] for each in found.failed] == [f"{liger}, which fails"]


def test_a_recipe_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match="there is no recipe 'torch, fast'; there are: torch; torch, compiled blocks"):
        One(cpu=True, quick=True, recipes=("torch, fast",))(Console())


def test_the_fastest_of_each_are_shown_kernel_by_kernel() -> None:
    kernels = {f"kernel {number}": 20.0 - number for number in range(20)}
    names = ("torch", PEER, "cubeloom", TRAINED)
    timed = [Timed(name, [ms], None, 0.0, {}, kernels) for name, ms in zip(names, (9.0, 8.0, 6.0, 7.0), strict=True)]
    found = Compared("title", timed, PEER, 1000, 1.0).fastest("torch", "cubeloom")
    assert [each.name for each in found] == [PEER, "cubeloom"]
    assert all(each.longest_table().row_count == 12 for each in found)


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


def test_what_is_hidden_is_a_share_of_the_shorter_in_each_turn() -> None:
    """Of the pair 4 of 10, then 5 of 10; of a step that computes for 8 and sums for 20, 4, then 6."""
    ms = dict(zip(overlap.PAIR, ([12.0, 12.0], [10.0, 10.0], [18.0, 17.0]), strict=True))
    ms |= {"a step": [24.0, 22.0], overlap.SUMS: [20.0, 20.0], overlap.COMPUTING: [8.0, 8.0]}
    found = overlap.Hidden("title", [Timed(name, each, None, 0.0) for name, each in ms.items()])
    assert found.shares() == {overlap.PAIR[2]: [0.4, 0.5], "a step": [0.5, 0.75]}
    assert found.share(overlap.PAIR[2]) == 0.45 and found.share("a step") == 0.625
    assert found.table().row_count == len(ms)


@pytest.mark.long
def test_a_step_and_its_parts_take_turns_and_a_trace_is_left(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (told,) = told_by(capsys, "overlap", "--ranks", "2", "--traces", str(tmp_path / "traces"))
    assert traced.Shown.of(tmp_path / "traces" / "tiny.json.gz") == traced.Shown(0, 0, 0, 0)  # a CPU has no kernels
    names = [each["name"] for each in told["timed"]]
    assert names == ["a step", "a step, two strands", overlap.SUMS, overlap.HALVES, overlap.COMPUTING, *overlap.PAIR]
    assert all(min(each["steps_ms"]) > 0 for each in told["timed"])


def test_a_trace_shows_what_runs_behind_collectives() -> None:
    """A collective from 0 to 10 ms, with kernels from 2 to 4, from 3 to 5 and, beyond it, from 9 to 12."""
    spans = {"ncclDevKernel": [(0, 10)], "nvjet": [(2, 2), (9, 3)], "triton": [(3, 2)]}
    events: list[dict[str, object]] = [
        {"cat": "kernel", "name": name, "ts": 1e3 * start, "dur": 1e3 * duration}
        for name, each in spans.items()
        for start, duration in each
    ]
    ignored = {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1e6}
    assert traced.Shown.of_events([*events, ignored]) == traced.Shown(whole=12, collectives=10, others=6, both=4)


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


@pytest.mark.parametrize("name", LLAMAS)
def test_flops_of_a_llama_are_those_of_its_matmuls(name: str) -> None:
    """Three passes of two FLOPs for each number of a matrix but the table, and attention in full."""
    size = LLAMAS[name]
    with torch.device("meta"):
        model = Llama(size)
    numbers = sum(each.numel() for name, each in model.named_parameters() if each.dim() > 1 and "embed" not in name)
    attention = 4 * size.sequence * size.hidden * size.layers
    assert size.teraflops == pytest.approx(3e-12 * size.tokens * (2 * numbers + attention))


@pytest.mark.gpu
@pytest.mark.skipif(not devices.available("cuda"), reason="needs a CUDA device")
@pytest.mark.parametrize("size", ["350M", "llama-1B"])
def test_every_recipe_on_a_gpu(size: Any) -> None:
    (found,) = One(quick=True, sizes=(size,), recipes=RECIPES)(Console())
    assert [each.name for each in found.timed] == list(RECIPES)
    for each in found.timed:
        assert each.loss == pytest.approx(found.timed[0].loss, abs=2e-2)
