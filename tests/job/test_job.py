"""A settings file says all of a job; what cannot work is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cubeloom import Grid, UserError
from cubeloom.base.grid import grids
from cubeloom.base.settings import load, write
from cubeloom.models import cut_of
from cubeloom.parallel.resolution import problems, specs_of
from cubeloom.train.data import Request, prepare
from cubeloom.train.job import Job, check
from cubeloom.train.job.replan import _Fits, replan
from cubeloom.train.job.settings import DataSettings, OptimizerSettings, Source

FILE = """
steps = 20

[model]
preset = "gpt-tiny"
layers = 4

[batch]
samples = 8
sequence = 16

[grid]
pipe = 2
x = 2

[schedule]
name = "chimera"
microbatches = 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(f'folder = "{tmp_path / "run"}"\n{FILE}')
    return path


def test_a_file_with_overrides(file: Path) -> None:
    job = load(Job, file, ["--grid.y=2", "--rate.peak=3e-4", "--steps=7"])
    assert job.grid == Grid(pipe=2, y=2, x=2)
    assert (job.steps, job.rate.peak) == (7, 3e-4)
    check(job)


def test_what_was_resolved_loads_as_the_same_job(file: Path, tmp_path: Path) -> None:
    job = load(Job, file, ['data.sources=[{folder = "a", weight = 0.5}, {folder = "b"}]'])
    (tmp_path / "resolved.toml").write_text(write(job))
    assert load(Job, tmp_path / "resolved.toml") == job


RECIPE = """
from pathlib import Path
from types import ModuleType
from typing import Any

from cubeloom import Grid
from cubeloom.train.job import Job
from cubeloom.train.job.settings import DataSettings, OptimizerSettings, Source

settings = Job(
    folder=Path("here"),
    grid=Grid(x=2),
    data=DataSettings(sources=(Source(folder=Path("a"), weight=0.5),)),
    optimizer=OptimizerSettings(clip=0.5),
)
"""


def test_a_recipe_that_makes_a_job_with_overrides(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(RECIPE)
    data = DataSettings(sources=(Source(folder=Path("a"), weight=0.5),))
    job = Job(folder=Path("here"), grid=Grid(x=2), data=data, optimizer=OptimizerSettings(clip=0.5))
    assert load(Job, tmp_path / "job.py") == job
    changed = replace(job, grid=Grid(x=2, y=2), optimizer=replace(job.optimizer, shard_optimizer_state=True))
    assert load(Job, tmp_path / "job.py", ["--grid.y=2", "optimizer.shard_optimizer_state=true"]) == changed


def test_one_worker_needs_no_schedule_and_accumulates(file: Path) -> None:
    job = load(Job, file, ["grid.pipe=1"])
    assert str(job.laid_out().schedule).splitlines()[0] == "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3 0R3"


REFUSED = {
    "grid.q=2": "unknown setting grid.q",
    "model.layer=2": "did you mean 'layers'",
    "steps=many": "steps = 'many' should be a whole number",
    "steps=0": "steps must be at least 1, got 0",
    "restarts=-1": "restarts must be at least 0",
    "num_comm_channels=1000000000": "num_comm_channels must be from 1 to 64",
    "seed=18446744073709551616": "seed = 18446744073709551616 does not fit into 64 bits",
    "batch.samples=6": "multiple of",
    "grid.x=5": "5",
    "grid.pipe=3": "chimera",
    "schedule.name=chimaera": "chimera",
    "optimizer.name=adam": "adamw",
    "optimizer.betas=[0.9]": "should have 2 entries",
    "optimizer.betas=[0.9, 1.0]": r"optimizer\.betas\[1\] must be at least 0 and below 1",
    "optimizer.momentum=1.0": "optimizer.momentum must be",
    "rate.warmup=50": "rate.warmup = 50: it does not fit",
    "rate.floor=2.0": "rate.peak = 0.001 to rate.floor = 2.0",
    "rate.peak=inf": "rate.peak = inf is not a finite number",
    "rate.cooldown=0.0": "rate.cooldown is a share",
    "batch.samples=0": "batch.samples must be from 1 to 16,777,216",
    "batch.sequence=0": "batch.sequence must be at least 1",
    "batch.sequence=1000": "64 positions",
    "model.preset=unet-tiny": "does not|predict the next|no such size",
    'data.sources=[{folder = "nowhere"}]': "nowhere",
    "schedule.name=pipedream-2bw": "within a step: .* optimizer.clip = 0",
    "optimizer.clip=-1": "optimizer.clip must be at least 0",
    "optimizer.weight_decay=-1": "optimizer.weight_decay must be at least 0",
    "optimizer.clip=inf": "optimizer.clip = inf is not a finite number",
    "optimizer.eps=nan": "optimizer.eps = nan is not a finite number",
    "optimizer.eps=0": "optimizer.eps must be above 0",
    "model.kv_heads=2": "no such size",
    "model.hidden=-4": "model.hidden must be from 1 to 16,777,216",
    "model.hidden=1000000000000000": "model.hidden must be from 1 to 16,777,216",
    "model.layers=1000000000": "model.layers must be from 1 to 2,000",
    "grid.x=1000000000": "ranks: at most 262,144",
    "schedule.microbatches=1000000000": "forwards: at most 250,000",
    "folder=/dev/null/run": "is a file",
    "checkpoint.every=0": "checkpoint.every must be at least 1",
    "checkpoint.keep=0": "checkpoint.keep must be at least 1",
    "guard.spike=0.5": "above 1",
    "guard.spike=nan": "not a finite number",
    "guard.max_consecutive_skips=0": "guard.max_consecutive_skips must be at least 1",
    "model.dropout=1.5": "model.dropout must be at least 0 and below 1, got 1.5",
    "model.dropout=-0.1": "at least 0 and below 1",
    "model.dropout=nan": "not a finite number",
    "model.label_smoothing=3.0": "model.label_smoothing must be at least 0 and below 1",
    "patience=0": "above 0",
    "patience=inf": "not a finite number",
    "patience=1e300": "patience must be above 0 and at most 1,000,000 seconds",
    "evaluation.every=0": "evaluation.every must be at least 1",
    "evaluation.batches=0": "evaluation.batches must be at least 1",
    "evaluation.patience=0": "evaluation.patience must be at least 1",
    "metrics.every=0": "metrics.every must be at least 1",
}


@pytest.mark.parametrize("override", REFUSED)
def test_refusals(file: Path, override: str) -> None:
    with pytest.raises(UserError, match=REFUSED[override]):
        check(load(Job, file, [override]))


def test_weights_that_torch_would_not_update(file: Path) -> None:
    few_digits = ["optimizer.name=sgd", "dtype=bfloat16"]
    check(load(Job, file, few_digits))
    with pytest.raises(
        UserError, match=r"optimizer\.fp32_master_weights = false: torch's sgd on a CPU does not update"
    ):
        check(load(Job, file, [*few_digits, "optimizer.fp32_master_weights=false"]))


@pytest.mark.parametrize("ranks", [0, 10**9])
def test_ranks_that_nobody_has_are_not_replanned_for(file: Path, ranks: int) -> None:
    with pytest.raises(UserError, match="--ranks must be from 1 to 262,144"):
        replan(load(Job, file), ranks)


def test_grids_that_cut_nothing_evenly_are_passed_over(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal looks for grids that work, and every look at a model takes a while: there are hundreds of grids."""
    looks: dict[str, int] = {"problems": 0, "nearest": 0}

    def counted(module: ModuleType, name: str) -> None:
        real = getattr(module, name)

        def called(*arguments: Any) -> Any:
            looks[name] += 1
            return real(*arguments)

        monkeypatch.setattr(module, name, called)

    counted(import_module("cubeloom.parallel.resolution"), "nearest")
    counted(import_module("cubeloom.train.job.replan"), "problems")
    assert replan(load(Job, file), 100).grid.world <= 100
    assert looks["nearest"] == 0 and looks["problems"] < 300


@pytest.mark.parametrize("preset", ["gpt-tiny", "llama-tiny"])
def test_replanning_asks_what_a_refusal_would_say(file: Path, preset: str) -> None:
    job = load(Job, file, [f"model.preset={preset}"])
    model = job.skeleton()
    cut, fits = cut_of(model), _Fits(job)
    for grid in (grid for world in (6, 24, 32, 64) for grid in grids(world, ("data", "z", "y", "x"))):
        told = list(problems(specs_of(model, cut), grid, job.rest, job.batch))
        assert fits(grid, job.batch.samples) is not bool(told)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_job_that_updates_within_a_step_switches_clipping_off(file: Path, tmp_path: Path, schedule: str) -> None:
    job = load(Job, file, [f"schedule.name={schedule}", "optimizer.clip=0"])
    check(job)
    (tmp_path / "resolved.toml").write_text(write(job))
    assert load(Job, tmp_path / "resolved.toml") == job


def test_a_vocabulary_that_the_model_does_not_have(file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text of some length, " * 20)
    prepare(Request(inputs=(tmp_path / "text.txt",)), tmp_path / "tokens")
    check(load(Job, file, [f'data.sources=[{{folder = "{tmp_path / "tokens"}"}}]']))
    with pytest.raises(UserError, match="vocabulary of 257, and the model one of 96"):
        check(load(Job, file, ["model.vocab=96", f'data.sources=[{{folder = "{tmp_path / "tokens"}"}}]']))
