"""The same job is the same training on every grid: losses, norms, evaluations, and what goes on after a checkpoint."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from jobs import MODEL, job

from cubeloom import UserError
from cubeloom.comm import CommunicationError, Network, devices
from cubeloom.launch import RankPool
from cubeloom.parallel.parameter import local_of
from cubeloom.train.checkpoint import checkpoints
from cubeloom.train.data import Request, prepare
from cubeloom.train.guard import WINDOW
from cubeloom.train.job import Job
from cubeloom.train.job.replan import replan
from cubeloom.train.job.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    GuardSettings,
    LayoutSettings,
    MetricsSettings,
    OptimizerSettings,
    RateSettings,
    Source,
)
from cubeloom.train.loop import Ended, train
from cubeloom.train.metrics import Record
from cubeloom.train.metrics.log import read_log
from cubeloom.train.metrics.run import read_run
from cubeloom.train.metrics_logger import MetricsLogger
from cubeloom.train.trainer import Trainer
from grids import rest_is_long

pytestmark = pytest.mark.timeout(120)


def run(ranks: RankPool, what: Job) -> list[Record]:
    """Train it; the records of all steps so far."""
    ended = ranks.run(what.grid.world, train, what, timeout=100)
    assert all(each == ended[0] for each in ended)
    return list(read_log(what.folder / "metrics.jsonl").records)


def same(ours: list[Record], theirs: list[Record], close: float = 1e-10) -> None:
    assert [each.step for each in ours] == [each.step for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=close)
        assert mine.gradient_norm == pytest.approx(other.gradient_norm, rel=close)
        assert (mine.validation or 0) == pytest.approx(other.validation or 0, rel=close)


@pytest.fixture(scope="module")
def serial(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """One process, no micro-batches."""
    folder = tmp_path_factory.mktemp("serial")
    return run(ranks, job(folder, microbatches=1, evaluation=EvaluationSettings(every=3, batches=2)))


ON = {
    "accumulating": ("x=1", "1f1b"),
    "cube": ("z=2,y=2,x=2", "1f1b"),
    "chimera": ("pipe=2,x=2", "chimera"),
    "chimera-zb": ("pipe=4", "chimera-zb"),
    "data": ("pipe=2,data=2", "zb-h1"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "zero"),
    [
        *(pytest.param(name, False, marks=pytest.mark.long) for name in ("accumulating", "chimera")),
        *((name, True) for name in ("cube", "chimera-zb", "data")),
    ],
)
def test_every_grid_trains_as_one_process_does(
    ranks: RankPool, tmp_path: Path, serial: list[Record], name: str, zero: bool
) -> None:
    grid, schedule = ON[name]
    microbatches = 2 if "z=2" in grid else 4
    evaluation = EvaluationSettings(every=3, batches=2)
    made = job(
        tmp_path,
        grid,
        schedule,
        microbatches,
        evaluation=evaluation,
        optimizer=OptimizerSettings(shard_optimizer_state=zero),
    )
    same(run(ranks, made), serial)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(ranks: RankPool, tmp_path: Path, serial: list[Record], recompute: str) -> None:
    layout = LayoutSettings(recompute=recompute, ways=2)  # type: ignore[arg-type]
    made = job(tmp_path, "x=2", microbatches=2, layout=layout, evaluation=EvaluationSettings(every=3, batches=2))
    same(run(ranks, made), serial)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> DataSettings:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("".join(chr(32 + (7 * i * i) % 60) for i in range(3000)))
    prepare(Request(inputs=(folder / "text.txt",)), folder / "tokens")
    return DataSettings(sources=(Source(folder=folder / "tokens"),))


GOES_ON = [("z=4", "1f1b", 2), ("pipe=4", "chimera", 4), ("x=1", "1f1b", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.long)])
def test_any_grid_goes_on(ranks: RankPool, tmp_path: Path, text: DataSettings, asynchronous: bool) -> None:
    """Weights, optimizer, place in the data, dropout and learning rate all go on."""
    more: dict[str, Any] = {
        "data": text,
        "checkpoint": CheckpointSettings(every=2, keep=9, asynchronous=asynchronous),
        "model": replace(MODEL, vocab=260),
    }
    never_stopped = run(ranks, job(tmp_path / "whole", microbatches=1, **more))
    made = job(
        tmp_path / "cut",
        "pipe=2,data=2,x=2",
        "chimera",
        4,
        optimizer=OptimizerSettings(shard_optimizer_state=True),
        **more,
    )
    ranks.run(made.grid.world, _train_until, made, 3, timeout=100)
    for grid, schedule, microbatches in GOES_ON:
        copy = tmp_path / f"on {grid}"
        shutil.copytree(tmp_path / "cut", copy)
        same(run(ranks, job(copy, grid, schedule, microbatches, **more)), never_stopped)


def _train_until(what: Job, steps: int) -> Ended:
    """As if somebody asked us to stop behind that many."""
    write = MetricsLogger.write

    def counting(self: MetricsLogger, step: int, *arguments: Any) -> bool:
        return write(self, step, *arguments) or step + 1 == steps

    MetricsLogger.write = counting  # type: ignore[method-assign, assignment]
    try:
        return train(what)
    finally:
        MetricsLogger.write = write  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_keeps_what_it_has(ranks: RankPool, tmp_path: Path, serial: list[Record]) -> None:
    made = job(tmp_path, "x=2", evaluation=EvaluationSettings(every=3, batches=2))
    ranks.run(2, _train_until, made, 3, timeout=60)
    assert [each.name for each in checkpoints(made.checkpoints)] == ["step-00000002", "step-00000003"]
    assert read_run(tmp_path).state.startswith("stopped when asked to")
    same(run(ranks, made), serial)
    assert read_run(tmp_path).state == "ended"


def test_steps_without_a_number_are_skipped_by_all(ranks: RankPool, tmp_path: Path) -> None:
    """A rate so high that the loss overflows; then nothing is updated, and the run ends when it has been too often."""
    wild = job(
        tmp_path,
        "x=2",
        steps=40,
        rate=RateSettings(peak=1e200, decay="constant"),
        guard=GuardSettings(max_consecutive_skips=3),
        optimizer=OptimizerSettings(clip=0, name="sgd"),
    )
    with pytest.raises(UserError, match="3 steps in a row had to be skipped"):
        ranks.run(2, train, wild, timeout=60)
    records = read_log(tmp_path / "metrics.jsonl").records
    assert [each.skipped is not None for each in records[-2:]] == [True, True]


ZERO, SGD = OptimizerSettings(shard_optimizer_state=True), OptimizerSettings(name="sgd")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    rest_is_long(product([ZERO, SGD], ["float64", "bfloat16"]), [(ZERO, "bfloat16"), (SGD, "float64")]),
    ids=lambda value: value if isinstance(value, str) else "zero" if value.shard_optimizer_state else "sgd",
)
def test_a_step_that_is_skipped_changes_nothing(
    ranks: RankPool, tmp_path: Path, optimizer: OptimizerSettings, dtype: str
) -> None:
    guarded = job(tmp_path, "data=2,x=2", guard=GuardSettings(spike=2), optimizer=optimizer, dtype=dtype)
    for first, spiked, after in ranks.run(4, _weights_around_a_spike, guarded, timeout=60):
        assert all(torch.equal(*both) for both in zip(first, spiked, strict=True))
        assert any(not torch.equal(*both) for both in zip(spiked, after, strict=True))


def _weights_around_a_spike(what: Job) -> list[list[torch.Tensor]]:
    """After a step, after one whose gradient is far above those before, and after one whose is not."""
    trainer = Trainer(what, Network(what.grid))
    found = []
    for norms in ([], [1e-9] * WINDOW, []):
        trainer._guard.norms = deque(norms, WINDOW)
        stepped = trainer.step()
        assert (stepped.skipped is not None) is bool(norms)
        assert stepped.skipped is None or "is over 2 times its median 1e-09" in stepped.skipped
        state = [value for kept in trainer.optimizer.optimizer.state.values() for value in kept.values()]
        found.append([each.detach().clone() for each in [*map(local_of, trainer.parameters.values()), *state]])
    trainer.close()
    return found


def test_memory_is_that_of_the_rank_that_holds_most(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks ask each other for it only when one has held more than before."""
    made = job(tmp_path, "data=2", steps=4)
    assert ranks.run(2, _asked_for_memory, made, timeout=60) == [2, 2]
    assert [each.memory_bytes for each in read_log(tmp_path / "metrics.jsonl").records] == [10, 10, 20, 20]


def test_a_step_lasts_as_long_as_on_the_mean_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """So that the means of its parts add up to it, also where rank 0 was done before others."""
    ranks.run(2, _two_clocks, job(tmp_path, "data=2"), timeout=60)
    (record,) = read_log(tmp_path / "metrics.jsonl").records
    assert record.seconds == 15.0
    assert record.computing_s is not None and record.exposed_s is not None and record.bubble_s is not None
    assert record.computing_s + record.exposed_s + record.bubble_s == pytest.approx(15.0)


def _two_clocks(what: Job) -> None:
    trainer = Trainer(what, Network(what.grid))
    with ExitStack() as stack:
        MetricsLogger(trainer, stack).write(0, trainer.step(), 20.0 if dist.get_rank() else 10.0, False)
    trainer.close()


def _asked_for_memory(what: Job) -> int:
    """How often, if rank 1 holds little at first and more in the third step."""
    held = iter([5, 5, 20, 20] if dist.get_rank() else [10] * 4)
    network = Network(what.grid)
    with patch.object(devices, "peak_memory", lambda _: next(held)), network.recording() as ledger:
        trainer = Trainer(what, network)
        with ExitStack() as stack:
            pages = MetricsLogger(trainer, stack)
            for step in range(4):
                pages.write(step, trainer.step(), 1.0, False)
        trainer.close()
    return sum(entry.origin == "memory" for entry in ledger.entries)


def test_who_fails_finishes_its_checkpoint_unless_another_rank_is_gone(ranks: RankPool, tmp_path: Path) -> None:
    """Then it would wait forever: the checkpoint waits for that other, too."""
    assert ranks.run(1, _fails_while_writing, job(tmp_path), ValueError("mine"), 0.5, timeout=60) == [True]
    gone = CommunicationError("another's")
    assert ranks.run(1, _fails_while_writing, job(tmp_path), gone, None, timeout=60) == [False]


def _fails_while_writing(what: Job, error: Exception, lasts: float | None) -> bool:
    """Whether a checkpoint that takes so long (None: forever) was written when the failure of the second step had ended all."""
    written = threading.Event()

    def write(*_: Any) -> None:
        threading.Event().wait(lasts)
        written.set()

    step = Mock(side_effect=[Mock(loss=1.0, norm=None, skipped=None, rate=0.0, waits=[]), error])
    with (
        patch("cubeloom.train.checkpoint.save._write", write),
        patch.object(Trainer, "step", step),
        pytest.raises(type(error)),
    ):
        train(replace(what, checkpoint=CheckpointSettings(every=1)))
    return written.is_set()


def test_validation_that_gets_no_better_ends_the_run(ranks: RankPool, tmp_path: Path) -> None:
    still = job(
        tmp_path,
        steps=50,
        rate=RateSettings(peak=0.0),
        evaluation=EvaluationSettings(every=1, batches=1, patience=3),
    )
    (ended,) = ranks.run(1, train, still, timeout=60)
    assert ended == Ended(4, "early stop", ended.loss)


def test_in_bfloat16_small_updates_are_not_lost(ranks: RankPool, tmp_path: Path) -> None:
    """Updates a thousandth of a weight are below its last digit in bfloat16; float32 masters add them up."""
    made = job(
        tmp_path, "data=2,x=2", steps=6, dtype="bfloat16", optimizer=OptimizerSettings(shard_optimizer_state=True)
    )
    before, after = ranks.run(4, _masters, made, timeout=60)[0]
    assert before.dtype is torch.float32
    assert not torch.equal(before, after)


def _masters(what: Job) -> tuple[torch.Tensor, torch.Tensor]:
    trainer = Trainer(replace(what, rate=RateSettings(peak=1e-6)), Network(what.grid))
    part = next(part for part in trainer.optimizer.parts.values() if part.tensor.dim() > 1)
    before = part.tensor.detach().clone()
    trainer.step()
    trainer.close()
    assert part.block.dtype is torch.bfloat16 and torch.equal(part.block, part.tensor.bfloat16())
    return before, part.tensor.detach()


def test_a_checkpoint_of_bfloat16_has_all_digits_in_float32(ranks: RankPool, tmp_path: Path) -> None:
    made = job(tmp_path, "x=2", steps=4, dtype="bfloat16")
    run(ranks, made)
    longer = replace(made, steps=6, dtype="float32", grid=job(tmp_path, "y=2").grid)
    assert ranks.run(2, _digits, longer, timeout=60)[0] > 7


def _digits(what: Job) -> int:
    """Most binary digits that any weight uses."""
    trainer = Trainer(what, Network(what.grid))
    weight = local_of(next(iter(trainer.parameters.values())))
    trainer.close()
    return 24 if not torch.equal(weight, weight.bfloat16().float()) else 7


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_that_starts_with_weights_of_bfloat16_has_all_their_digits(
    ranks: RankPool, tmp_path: Path, dtype: str
) -> None:
    made = job(tmp_path / "first", "x=2", steps=2, dtype="bfloat16")
    run(ranks, made)
    started = job(tmp_path / "second", "x=2", dtype=dtype, model=replace(MODEL, start=made.folder))
    for mine, theirs in zip(*(ranks.run(2, _updated, each, timeout=60) for each in (started, made)), strict=True):
        assert mine.dtype is torch.float32 and torch.equal(mine, theirs)
        assert not torch.equal(mine, mine.bfloat16().float())


def _updated(what: Job) -> torch.Tensor:
    """What the optimizer updates, before it does: masters, where there are some."""
    trainer = Trainer(what, Network(what.grid))
    trainer.close()
    return torch.cat([part.tensor.detach().flatten() for part in trainer.optimizer.parts.values()])


def test_fewer_ranks_go_on_with_the_best_grid_that_fits(ranks: RankPool, tmp_path: Path, serial: list[Record]) -> None:
    made = job(tmp_path, "pipe=2,x=2", "chimera", evaluation=EvaluationSettings(every=3, batches=2))
    ranks.run(4, _train_until, made, 2, timeout=60)
    fitted = replan(made, 3)
    assert fitted.grid.world == 3 and fitted.model == made.model and fitted.batch == made.batch
    same(run(ranks, fitted), serial)


@pytest.mark.slow
def test_metrics_say_where_the_time_went(ranks: RankPool, tmp_path: Path) -> None:
    made = job(tmp_path, "pipe=2,x=2", "chimera", metrics=MetricsSettings(every=1))
    for record in run(ranks, made):
        assert record.computing_s is not None and record.exposed_s is not None and record.bubble_s is not None
        assert record.exposed_s > 0 and record.bubble_s > 0
        assert record.computing_s + record.exposed_s + record.bubble_s == pytest.approx(record.seconds)
        assert record.mfu is None  # nobody says what this machine could do
    assert (tmp_path / "report.html").stat().st_size > 1000
    told = read_run(tmp_path)
    assert told.state == "ended" and told.restarts == 0


@pytest.mark.slow
def test_the_same_job_has_the_same_bits_and_can_be_made_to(ranks: RankPool, tmp_path: Path) -> None:
    runs = [run(ranks, job(tmp_path / name, "x=2", steps=3)) for name in ("one", "other")]
    assert [each.loss for each in runs[0]] == [each.loss for each in runs[1]]
    assert ranks.run(1, _deterministic, job(tmp_path / "flag", steps=2, deterministic=True), timeout=60) == [True]


def _deterministic(what: Job) -> bool:
    train(what)
    found = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # this process goes on to other tests
    return found
