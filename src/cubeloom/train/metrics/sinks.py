"""Sinks besides metrics.jsonl: TensorBoard and Weights & Biases, each an extra that may not be installed."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from cubeloom.base.errors import UserError
from cubeloom.train.job.settings import MetricsSettings
from cubeloom.train.metrics.record import Record


class Sink(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def check_sinks(settings: MetricsSettings) -> None:
    """Raises UserError for a sink whose package is not installed. Starts and writes nothing."""
    wanted = {"tensorboard": settings.tensorboard, "wandb": settings.wandb is not None}
    for name, asked in wanted.items():
        if asked and not _installed(name):
            value = "true" if name == "tensorboard" else repr(settings.wandb)
            raise UserError(
                f"metrics.{name} = {value}: the package {name} is not installed; pip install 'cubeloom[{name}]', "
                "or leave the setting out: metrics.jsonl is written always"
            )


def _installed(name: str) -> bool:
    # Any folder of that name looks like a namespace package, and both create such folders in the working directory.
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def make_sinks(folder: Path, settings: MetricsSettings, first_step: int) -> list[Sink]:
    made: list[Sink] = []
    if settings.tensorboard:
        made.append(TensorBoard(folder, first_step))
    if settings.wandb is not None:
        made.append(WeightsAndBiases(folder, settings.wandb, first_step))
    return made


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record, by name."""
    for name, value in record.as_json().items():
        if name != "step" and isinstance(value, int | float):
            yield name, value


class TensorBoard:
    """Files under `tensorboard/`. On a resume TensorBoard hides the later steps of a crashed attempt."""

    def __init__(self, folder: Path, first_step: int) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = module.SummaryWriter(str(folder / "tensorboard"), purge_step=first_step or None)

    def write(self, record: Record) -> None:
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per folder, which a resume continues."""

    def __init__(self, folder: Path, project: str, first_step: int) -> None:
        wandb = importlib.import_module("wandb")
        known, settings = folder / "wandb-id", folder / "settings.toml"
        name = known.read_text(encoding="utf-8").strip() if first_step and known.exists() else None
        self._run: Any = wandb.init(
            project=project,
            dir=str(folder),
            name=folder.name,
            id=name,
            resume="allow",
            config=tomllib.loads(settings.read_text(encoding="utf-8")) if settings.exists() else None,
        )
        known.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._run.log(dict(scalars(record)), step=record.step)

    def close(self) -> None:
        self._run.finish()
