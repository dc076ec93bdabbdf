"""Jobs larger than this machine; what a rehearsal leaves behind; the command."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._subclasses import FakeTensor

from cubeloom.base.errors import UserError
from cubeloom.cli.rehearse import Rehearse
from cubeloom.comm.recording_backend import Call, Tape, Wait, rehearsed
from cubeloom.models import GPTConfig
from cubeloom.tools.rehearse import Tracker, rehearse
from cubeloom.tools.rehearse.without_values import without_values
from cubeloom.tools.verify import Experiment

from .jobs import BERT, JOBS, LLAMA, closed_form, job

pytestmark = pytest.mark.timeout(120)

WIDE = GPTConfig(vocab=1024, positions=16, hidden=128, layers=2, heads=64)
LARGE = [
    job("pipe=4,data=4,z=2,x=2", "chimera", steps=1),  # 64 ranks
    job("z=8,y=8,x=8", model=WIDE, steps=1),  # 512
    job("pipe=2,data=8,z=4,y=4,x=4", "chimera", model=WIDE, steps=1),  # 1,024
]
LARGER = [
    job("pipe=4,data=4,z=4,y=4,x=4", "chimera", model=WIDE),  # 1,024
    job("z=4,y=4,x=4", model=WIDE, zero=True),  # 64
    job("pipe=2,data=8,y=2,z=2", "zb-h1", model=LLAMA, zero=True),
    job("pipe=4,data=16,z=2,y=2,x=2", "chimera", microbatches=8),  # 512
    job("data=8,z=4,y=4,x=4", model=WIDE, ways=2),
    job("pipe=8,data=2,z=2,y=4,x=4", "chimera-zb", model=replace(WIDE, layers=6), microbatches=8),
]


def label(experiment: Experiment) -> str:
    return f"{experiment.grid.world}:{experiment.grid}"


@pytest.mark.parametrize(
    "experiment", [*LARGE, *(pytest.param(each, marks=pytest.mark.long) for each in LARGER)], ids=label
)
def test_bytes_are_the_closed_form_s(experiment: Experiment) -> None:
    rehearsal = rehearse(experiment)
    assert rehearsal.problems == ()
    assert len(rehearsal.runs) == experiment.grid.pipe
    for run in rehearsal.runs:
        assert run.bytes == closed_form(experiment, run.rank)


def test_any_rank_can_be_asked_for() -> None:
    experiment = job("pipe=2,data=32", "1f1b", steps=1)
    rehearsal = rehearse(experiment, [37])
    assert [run.rank for run in rehearsal.runs] == [37, 0]
    assert rehearsal.chosen.rank == 37
    with pytest.raises(UserError, match=r"no rank 64 .* ranks 0 to 63"):
        rehearse(experiment, [64])


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid", ["y=2", *(pytest.param(grid, marks=pytest.mark.long) for grid in ("y=4", "z=2,y=4,x=2"))]
)
def test_first_tokens_are_found_without_values(grid: str) -> None:
    """With four ranks of y some have no sequence that begins in their rows."""
    experiment = job(grid, model=replace(BERT, next_sentence=True), steps=1)
    found, true = rehearse(experiment), rehearse(experiment, real=True)
    assert found.matched
    for shape, computed in zip(found.runs, true.runs, strict=True):
        assert shape.bytes == closed_form(experiment, shape.rank) == computed.bytes
        assert shape.memory.at_peak == computed.memory.at_peak


def test_what_was_sent_is_let_go_within_the_step() -> None:
    """A message that comes back shows that it has arrived: more micro-batches take no more memory, but for their tokens."""

    def most(microbatches: int) -> list[int]:
        runs = rehearse(job("pipe=2", "1f1b", microbatches=microbatches, steps=1)).runs
        return [run.memory.at_peak["activations"] + run.memory.at_peak["buffers"] for run in runs]

    tokens = 6 * 12 * 2 * 8  # six samples of 12 tokens more, and as many targets
    assert most(10) == [size + tokens for size in most(4)]


def test_every_call_of_a_step_is_in_the_ledger() -> None:
    """The ledger is what our own layer writes; the tape what torch was asked for."""
    (run,) = rehearse(JOBS["cube"]).runs
    calls = [event for event in run.tape.events if isinstance(event, Call)][-len(run.ledger.entries) :]
    assert [(call.operation, call.origin) for call in calls] == [
        (entry.operation, entry.origin) for entry in run.ledger.entries
    ]
    assert [call.size for call in calls] == [entry.size for entry in run.ledger.entries]
    starts = {number for number, event in enumerate(run.tape.events) if isinstance(event, Call)}
    assert starts == {event.call for event in run.tape.events if isinstance(event, Wait)}


def fake_tensors() -> list[object]:
    return [each for each in gc.get_objects() if type(each) is FakeTensor]


@pytest.mark.slow
def test_nothing_is_left_behind() -> None:
    before = (
        fake_tensors()
    )  # torch's compiler keeps those with which it traced what earlier tests of this process compiled
    experiment = job("pipe=2,x=2", "1f1b", steps=1)
    first = rehearse(experiment)
    assert not dist.is_initialized()
    gc.collect()
    assert {id(each) for each in fake_tensors()} <= {id(each) for each in before}
    assert torch.ones(3).sum().item() == 3
    second = rehearse(experiment)
    assert [run.memory for run in first.runs] == [run.memory for run in second.runs]
    assert [run.tape.events for run in first.runs] == [run.tape.events for run in second.runs]


def test_nothing_is_left_behind_by_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Experiment, step: int) -> dict[str, torch.Tensor]:
        raise RuntimeError("no samples")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no samples"):
        patched.setattr(Experiment, "samples", broken)
        rehearse(JOBS["cube"])
    assert not dist.is_initialized()
    assert torch.ones(3).sum().item() == 3
    assert rehearse(JOBS["cube"]).matched


def test_a_rank_of_a_job_does_not_rehearse_another() -> None:
    with rehearsed(0, 8), pytest.raises(UserError, match="a rank of a job already"):
        rehearse(JOBS["cube"])


@pytest.mark.slow
def test_true_tensors_take_what_those_without_values_say() -> None:
    experiment = job("pipe=2,x=2", "chimera", zero=True)
    for shape, true in zip(rehearse(experiment).runs, rehearse(experiment, real=True).runs, strict=True):
        assert true.bytes == shape.bytes
        assert true.memory.peak == shape.memory.peak
        assert true.memory.at_peak == shape.memory.at_peak
        assert true.tape.events == shape.tape.events
        assert true.compute_s is not None
        assert shape.compute_s is None


@pytest.mark.parametrize("values", [True, False])
def test_a_tracker_sees_storages_come_and_go(values: bool) -> None:
    with nullcontext() if values else without_values(), Tracker() as tracker:
        weight = torch.zeros(60, dtype=torch.float64, requires_grad=True)
        torch.zeros(1000, dtype=torch.float64)  # gone before the peak counts
        tracker.label("parameters", [weight])
        tracker.begin()
        _Kept.apply(weight, tracker).backward()
    memory = tracker.memory()
    assert memory.at_peak == {
        "parameters": 8 * 60,
        "gradients": 8 * 60,
        "optimizer": 0,
        "activations": 8 * (100 + 1 + 1),  # what is kept, the sum, and the one that a backward begins with
        "buffers": 8 * 200,
    }
    assert memory.peak == sum(memory.at_peak.values())
    assert max(size for _, size in memory.over_time) == 8 * 1060
    assert max(size for _, size in memory.thinned(3)) == 8 * 1060
    assert len(memory.thinned(3)) <= 3


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tracker: Tracker) -> torch.Tensor:
        ctx.kept, ctx.tracker = torch.zeros(100, dtype=torch.float64), tracker
        torch.zeros(50, dtype=torch.float64)
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        room = torch.zeros(200, dtype=torch.float64)
        found = torch.zeros(60, dtype=torch.float64)
        ctx.tracker.label("gradients", [found])
        del room
        return found, None


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = Rehearse(grid="pipe=2,data=8,x=2", schedule="chimera", microbatches=2, rank=9, steps=1, json=True)
    assert command() == 0
    said = capsys.readouterr()
    assert "the communications of all 32 fit together" in said.err
    found = json.loads(said.out.splitlines()[-1])
    assert found["world"] == 32
    assert found["ranks_run"] == [9, 16]
    assert found["rank"] == 9
    assert found["matched"] is True
    assert {"x", "pipe", "pipe+data"} <= set(found["bytes"])
    assert found["memory"]["peak"] == sum(size for kind, size in found["memory"].items() if kind != "peak")
    assert found["seconds"] > 0


def test_the_command_says_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cubeloom.tools.rehearse.rehearsal.match", lambda *_: ["deadlock: rank 0 waits"])
    assert Rehearse(grid="x=2", steps=1)() == 1
    assert "deadlock: rank 0 waits" in capsys.readouterr().out


def test_a_world_beyond_all_machines_is_refused() -> None:
    assert Rehearse(grid="data=2", ranks=100_000).experiment().grid.world == 100_000
    with pytest.raises(UserError, match="has 1,000,000,000,000 ranks: at most 262,144"):
        Rehearse(grid="data=2", ranks=10**12)()


def test_numbers_that_are_asked_for() -> None:
    with without_values():
        tensor = torch.zeros(2, 3)
        assert tensor.sum().item() == 1.0
        assert tensor.tolist() == [[1.0] * 3] * 2
        assert (tensor == 0).all().item() is True
        assert tensor.data_ptr() == tensor.view(6).data_ptr() != torch.zeros(2, 3).data_ptr()
    with pytest.raises(RuntimeError):
        tensor.sum().item()


def test_a_tape_alone() -> None:
    tape = Tape()
    assert tape.group("1", (0, 1)) != tape.group("2", (0, 1)) != tape.group("3", (0, 2))
    assert tape.origin() == ""


def test_a_file_s_numbers_are_those_that_it_computes_in(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('dtype = "bfloat16"\n[model]\npreset = "gpt-tiny"\n[batch]\nsamples = 4\nsequence = 8\n')
    assert Rehearse(file=file).experiment().dtype is torch.bfloat16
    assert Rehearse(file=file, dtype="float32").experiment().dtype is torch.float32
    assert Rehearse(grid="x=2").experiment().dtype is torch.float64
