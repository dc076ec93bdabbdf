"""A model, a loss, an optimizer and data of the user's own, named in a settings file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cubeloom
from commands import exit_code
from cubeloom import Grid, UserError
from cubeloom.base.registry import Registry, function_of
from cubeloom.base.settings import load
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models.named import LOSSES
from cubeloom.train.job import Job, check
from cubeloom.train.job.registries import DATA, OPTIMIZERS
from cubeloom.train.job.settings import DataSettings, GuardSettings, ModelSettings, OptimizerSettings, RateSettings
from cubeloom.train.loop import train
from cubeloom.train.metrics.log import NAME, read_log
from cubeloom.train.optimizers import check_elementwise

EXAMPLES = Path(__file__).parents[2] / "examples"
PARTS = str(EXAMPLES / "own_parts.py")
Named = Registry[Any]


def job_of(folder: Path, **changes: Any) -> Job:
    job = load(Job, EXAMPLES / "own_parts.toml", [f"folder={folder}", "steps=30", "dtype=float64"])
    names: dict[str, Any] = {
        "model": ModelSettings(name=f"{PARTS}:net", loss=f"{PARTS}:smoothed"),
        "data": DataSettings(name=f"{PARTS}:spiral"),
        "optimizer": replace(job.optimizer, name=f"{PARTS}:lion"),
    }
    return replace(job, **names | changes)


def losses(folder: Path) -> list[float]:
    return [record.loss for record in read_log(folder / NAME).records]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)


@pytest.mark.slow
def test_the_example_trains_alike_on_every_grid_and_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    check(load(Job, EXAMPLES / "own_parts.toml"))
    ranks.run(1, train, job_of(tmp_path / "alone"))
    rate = replace(job_of(tmp_path).rate, decay="constant")
    ranks.run(1, train, job_of(tmp_path / "whole", rate=rate))
    sharded = replace(job_of(tmp_path).optimizer, shard_optimizer_state=True)
    ranks.run(2, train, job_of(tmp_path / "cut", rate=rate, steps=15, grid=Grid(y=2)))
    ranks.run(2, train, job_of(tmp_path / "cut", rate=rate, grid=Grid(data=2), optimizer=sharded))
    alone = losses(tmp_path / "alone")
    assert alone[-1] < 0.9 * alone[0]
    # Lion takes the sign of a mean: five steps after the change of grid the last bits of a small one decide.
    assert losses(tmp_path / "cut")[:20] == pytest.approx(losses(tmp_path / "whole")[:20], rel=1e-4)


def test_a_step_that_the_guard_refuses_is_skipped_on_the_host(ranks: RankPool, tmp_path: Path) -> None:
    (before, after), _ = ranks.run(2, _skipping, job_of(tmp_path, grid=Grid(z=2), guard=GuardSettings(spike=1.5)))
    assert torch.equal(before, after)


def _head(trainer: Any) -> Tensor:
    found: Tensor = trainer.parameters["head.weight"].detach().full_tensor().clone()
    return found


def _skipping(job: Job) -> tuple[Tensor, Tensor]:
    from cubeloom.train.trainer import Trainer

    trainer = Trainer(job, Network(job.grid))
    for _ in range(10):
        trainer.step()
    trainer._guard.norms.extend([1e-9] * 32)  # so that the next norm is a spike
    before = _head(trainer)
    result = trainer.step()
    assert result.skipped is not None
    found = before, _head(trainer)
    trainer.close()
    return found


@pytest.mark.parametrize("registry", [OPTIMIZERS, DATA, LOSSES], ids=lambda each: each.what)
def test_every_name_is_of_something(registry: Named) -> None:
    assert all(callable(registry.find(name)) for name in registry)


@pytest.mark.parametrize("name", [*OPTIMIZERS, f"{PARTS}:lion"])
def test_optimizers_are_element_wise(name: str) -> None:
    assert check_elementwise(OptimizerSettings(name=name)) in ("AdamW", "SGD", "Lion")


def by_norm(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return ByNorm(groups, {"lr": 0.1})


class ByNorm(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.data -= group["lr"] * each.grad / each.grad.norm()


def counting(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return torch.optim.ASGD(groups)


def nothing(groups: list[dict[str, Any]], settings: OptimizerSettings) -> Any:
    return None


def of_values(folder: Path, grid: Grid) -> float | None:
    """The same parts as values of a program."""
    spiral, lion = (function_of(PARTS, name) for name in ("spiral", "lion"))
    trainer = cubeloom.Trainer(
        function_of(PARTS, "net"),
        Network(grid),
        spiral(Job(dtype="float64"), "training"),
        lambda groups, settings: lion(groups, OptimizerSettings(betas=(0.9, 0.99))),
        RateSettings(peak=1e-2, decay="constant"),
        folder,
        batch=(48, 1),
        steps=3,
        loss=function_of(PARTS, "smoothed"),
        dtype="float64",
    )
    return trainer.fit().loss


def test_a_program_gives_the_same_parts_as_values(ranks: RankPool, tmp_path: Path) -> None:
    alone = ranks.run(1, of_values, tmp_path / "alone", Grid())
    assert ranks.run(2, of_values, tmp_path / "cut", Grid(z=2)) == pytest.approx(2 * alone, rel=1e-6)
    rate = RateSettings(peak=1e-2, decay="constant")
    ranks.run(1, train, job_of(tmp_path / "file", rate=rate, steps=3))
    assert losses(tmp_path / "alone") == pytest.approx(losses(tmp_path / "file"), rel=1e-6)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(x, targets)


def test_what_would_not_train_as_the_serial_model_is_refused(tmp_path: Path) -> None:
    for name, words in {
        "by_norm": "ByNorm is not element-wise",
        "counting": "keeps 'eta', and a checkpoint can store only",
        "nothing": "gives NoneType, and not a torch.optim.Optimizer",
        "by_nrom": "has no function 'by_nrom'; did you mean 'by_norm'",
    }.items():
        with pytest.raises(UserError, match=words):
            check_elementwise(OptimizerSettings(name=f"{__file__}:{name}"))
    for changes, words in (
        ({"data": DataSettings(name="tokens")}, "data.name = 'tokens' needs data.sources"),
        (
            {"model": ModelSettings(name=f"{__file__}:Plain", loss="mse")},
            "forward needs targets: it computes its own loss",
        ),
        ({"model": ModelSettings(name="gpt-tiny", loss="mse")}, "gpt-tiny computes its own loss"),
    ):
        with pytest.raises(UserError, match=words):
            check(job_of(tmp_path, **changes))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--optimizer.name=adamm", "did you mean 'adamw'"),
        ("--data.name=token", "did you mean 'tokens'"),
        ("--model.loss=crossentropy", "did you mean 'cross_entropy'"),
        ("--optimizer.name=nowhere.py:lion", "there is no file nowhere.py"),
        ("--schedule.name=chimaera", "did you mean 'chimera'"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "examples/own_parts.toml", option) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_run_names_is_not_executed(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(1, train, job_of(tmp_path / "run", steps=1))
    mark = tmp_path / "executed"
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(mark)!r}, 'w')\n\n\ndef lion(*_):\n    pass\n")
    stored = tmp_path / "run" / "settings.toml"
    stored.write_text(stored.read_text().replace(PARTS, str(evil)))
    for command in ("sample", "evaluate", "report"):
        exit_code(command, str(tmp_path / "run"))
    assert exit_code("evaluate", str(tmp_path / "run"), "--model", f"{PARTS}:net") == 2
    assert "no file is executed that a run names" in capsys.readouterr().err
    assert not mark.exists()
