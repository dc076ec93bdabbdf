"""The trainer from values: models, data and callbacks of a program; and images and masked text from settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import cubeloom
from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.parallel import Batch
from cubeloom.train.data import Request, prepare
from cubeloom.train.job import Job
from cubeloom.train.job.masked import MaskedTokens
from cubeloom.train.job.samples import samples_of
from cubeloom.train.job.settings import DataSettings, ModelSettings, RateSettings, Source
from cubeloom.train.loop import train
from cubeloom.train.metrics.log import NAME, read_log
from cubeloom.train.metrics.report import page
from cubeloom.train.metrics.run import read_run
from cubeloom.train.trainer import StepResult

pytestmark = pytest.mark.timeout(120)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(x), y)


class Points:
    """Numbers that say which of four kinds they are of."""

    sequence, as_forward = 1, True

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        y = numbers % 4
        x = torch.nn.functional.one_hot(y, 8).double() + torch.sin(numbers[:, None] + torch.arange(8.0)).double() / 9
        return {"x": x, "y": y}


def norm_of_head(step: int, result: StepResult, trainer: Any) -> Mapping[str, float]:
    weight = trainer.parameters["head.weight"].detach()
    return {"head norm": float(weight.full_tensor().norm()), "loss twice": 2 * result.loss}


def build() -> nn.Module:
    with torch.device("meta"):
        return Net()


def fit(folder: Path, grid: Grid, steps: int) -> float | None:
    made = cubeloom.Trainer(
        Net,
        Network(grid),
        Points(),
        schedule=RateSettings(peak=3e-2, decay="constant"),
        checkpoints=folder,
        callbacks=[norm_of_head],
        batch=(8, 1),
        steps=steps,
        dtype="float64",
    )
    return made.fit().loss


@pytest.mark.slow
def test_a_program_trains_its_own_model_on_its_own_data_and_measures(ranks: RankPool, tmp_path: Path) -> None:
    alone = ranks.run(1, fit, tmp_path / "alone", Grid(), 12)
    ranks.run(2, fit, tmp_path / "cut", Grid(y=2), 6)
    both = ranks.run(2, fit, tmp_path / "cut", Grid(z=2), 12)  # goes on where the other grid stopped
    assert both == pytest.approx(alone * 2, rel=1e-6)
    records = read_log(tmp_path / "cut" / NAME).records
    theirs = read_log(tmp_path / "alone" / NAME).records
    assert [record.step for record in records] == list(range(12))
    assert records[-1].loss < 0.9 * records[0].loss
    for mine, other in zip(records, theirs, strict=True):
        assert mine.own == pytest.approx(other.own, rel=1e-6) and mine.own["loss twice"] == 2 * mine.loss
    report = page(read_run(tmp_path / "cut"))
    assert "head norm" in report and "loss twice" in report


def test_wrong_values_are_refused_at_once(tmp_path: Path) -> None:
    mesh: Any = _Mesh()
    wanted: dict[str, Any] = {"batch": (8, 1), "steps": 0, "checkpoints": tmp_path}
    with pytest.raises(UserError, match="steps must be at least 1"):
        cubeloom.Trainer(Net, mesh, Points(), **wanted)


class _Mesh:
    grid, device = Grid(), torch.device("cpu")


def job_of(folder: Path, model: ModelSettings, **changes: Any) -> Job:
    made = Job(folder=folder, steps=2, dtype="float64", patience=60, model=model, batch=Batch(8, 8))
    return replace(made, **changes)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / NAME).read_text().splitlines() if "event" not in line]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "labelled"), [("resnet-tiny", True), ("unet-tiny", False)])
def test_images_train_from_a_settings_file(ranks: RankPool, tmp_path: Path, preset: str, labelled: bool) -> None:
    config: Any = ModelSettings(preset=preset).source().config  # type: ignore[attr-defined]
    channels = config.channels if labelled else config.in_channels
    shown = torch.randint(256, (12, channels, config.image, config.image), dtype=torch.uint8)
    tensors = {"images": shown} | ({"labels": torch.arange(12) % config.classes} if labelled else {})
    save_file(tensors, tmp_path / "training.safetensors")
    data = DataSettings(sources=(Source(folder=tmp_path),))
    curves = []
    for name, grid in (("alone", Grid()), ("cut", Grid(data=2))):
        made = job_of(tmp_path / name, ModelSettings(preset=preset), data=data, grid=grid)
        ranks.run(grid.world, train, made)
        curves.append(losses(tmp_path / name))
    assert curves[0] == pytest.approx(curves[1], rel=1e-9) and len(curves[0]) == 2
    with pytest.raises(UserError, match=r"no images in .*validation.safetensors"):
        samples_of(job_of(tmp_path / "x", ModelSettings(preset=preset), data=data), "validation")


@pytest.mark.slow
def test_bert_trains_on_masked_text_and_any_model_on_random_samples(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc" * 1500)
    prepare(Request(inputs=(tmp_path / "text.txt",)), tmp_path / "tokens")
    data = DataSettings(sources=(Source(folder=tmp_path / "tokens"),))
    for name, source in (("masked", data), ("random", DataSettings())):
        made = job_of(tmp_path / name, ModelSettings(preset="bert-tiny"), data=source, grid=Grid(y=2))
        ranks.run(2, train, made)
        assert len(losses(tmp_path / name)) == 2
    small = job_of(tmp_path / "x", ModelSettings(preset="bert-tiny", vocab=257), data=data)
    with pytest.raises(UserError, match="has no token left that hides others"):
        samples_of(small, "training")


class Counting:
    sequence = 40

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        return {"tokens": (numbers[:, None] + torch.arange(40)) % 50}


def test_a_seventh_of_the_tokens_are_hidden_and_learned() -> None:
    masked = MaskedTokens(Counting(), 50, 60, seed=1)
    found, plain = masked.batch(torch.arange(200)), Counting().batch(torch.arange(200))["tokens"]
    learned = found["targets"] != -100
    assert learned.double().mean().item() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(found["targets"][learned], plain[learned])
    assert torch.equal(found["tokens"][~learned], plain[~learned])
    hidden = (found["tokens"] == 60) & learned
    assert (hidden.sum() / learned.sum()).item() == pytest.approx(0.8, abs=0.03)
    assert learned.any(1).all()
    assert torch.equal(masked.batch(torch.tensor([7]))["tokens"][0], found["tokens"][7])  # whoever asks
