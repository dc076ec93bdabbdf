"""A training from Python values instead of a settings file, inside your own program.

mesh = cubeloom.init(data=2, z=2)
trainer = Trainer("path/to/folder", mesh, ["tokens"], batch=(64, 1024), steps=1000, checkpoints="runs/mine")
trainer.fit()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.models import ModelSource
from cubeloom.models.losses import Loss
from cubeloom.models.named import named
from cubeloom.models.user_model import GivenModel
from cubeloom.parallel import Batch
from cubeloom.train.data import Samples
from cubeloom.train.job import Job, check
from cubeloom.train.job.settings import (
    CheckpointSettings,
    DataSettings,
    LayoutSettings,
    ModelSettings,
    OptimizerSettings,
    RateSettings,
    ScheduleSettings,
    Source,
)
from cubeloom.train.loop import Callback, Ended, train
from cubeloom.train.optimizers import Builder

Given = Samples | Mapping[Literal["training", "validation"], Samples]


@dataclass(frozen=True, kw_only=True)
class _GivenJob(Job):
    """A job whose model and samples are values from a program, and whose other settings are as usual."""

    def source(self) -> ModelSource:
        return cast(ModelSource, vars(self)["_source"])

    def given_samples(self, part: str) -> Samples | None:
        given = vars(self)["_samples"]
        return cast("Samples | None", given.get(part) if isinstance(given, Mapping) else given)

    @property
    def given_optimizer(self) -> Builder | None:
        return cast("Builder | None", vars(self)["_optimizer"])

    def giving(self, source: ModelSource, samples: Given | None, optimizer: Builder | None) -> Self:
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_samples", samples)
        object.__setattr__(self, "_optimizer", optimizer)
        return self


class Trainer:
    """`fit` trains, from the newest checkpoint if the folder has one. Created and called by all ranks of the mesh.

    - `model`: a preset, a Hugging Face folder, `file.py:function`, a `ModelSource`, or a function that returns a module
      whose forward takes a batch by keyword and returns the loss;
    - `data`: folders that `cubeloom data prepare` wrote, or folders of images; or an object with `sequence` and
      `batch(numbers)`, which returns the samples of these numbers, always the same, as `tokens` and `targets` or, if it
      has `as_forward = True`, with the names of the forward; one for each of training and validation, or one for both.
      None: random samples;
    - `batch`: samples of a step over the whole mesh, and tokens per sample;
    - `optimizer`: settings; or a function from groups of parameters and settings to an element-wise torch optimizer;
    - `loss`: cross_entropy, mse, `file.py:function` or a function of the model's output and the targets, for a model
      that does not compute its own;
    - `schedule` of the learning rate; `pipeline` if the mesh has a pipe axis;
    - `checkpoints`: the folder of the run, with its metrics and report;
    - `callbacks`: see `Callback`.
    """

    def __init__(
        self,
        model: str | ModelSource | Callable[[], nn.Module],
        mesh: Network,
        data: Sequence[str | Path] | Given | None = None,
        optimizer: OptimizerSettings | Builder | None = None,
        schedule: RateSettings | None = None,
        checkpoints: str | Path = "runs/cubeloom",
        callbacks: Sequence[Callback] = (),
        *,
        batch: tuple[int, int],
        steps: int,
        loss: str | Loss | None = None,
        pipeline: ScheduleSettings | None = None,
        layout: LayoutSettings | None = None,
        save: CheckpointSettings | None = None,
        dtype: Literal["float64", "float32", "bfloat16"] = "float32",
        seed: int = 0,
    ) -> None:
        """Raises UserError for invalid arguments."""
        source = _source(model, data, loss)
        settings = optimizer if isinstance(optimizer, OptimizerSettings) else OptimizerSettings()
        builder = optimizer if callable(optimizer) else None
        folders = data if isinstance(data, Sequence) else ()
        self.mesh, self.callbacks = mesh, tuple(callbacks)
        self.job = _GivenJob(
            folder=Path(checkpoints),
            steps=steps,
            seed=seed,
            dtype=dtype,
            device=mesh.device.type,  # type: ignore[arg-type]
            model=ModelSettings(name=model if isinstance(model, str) else source.name),
            data=DataSettings(sources=tuple(Source(folder=Path(each)) for each in folders)),
            batch=Batch(*batch),
            grid=mesh.grid,
            schedule=pipeline or ScheduleSettings(),
            layout=layout or LayoutSettings(),
            optimizer=settings,
            rate=schedule or RateSettings(),
            checkpoint=save or CheckpointSettings(),
        ).giving(source, None if isinstance(data, Sequence) else data, builder)
        check(self.job)

    def fit(self) -> Ended:
        """Train until the last step, or until a signal asks to stop."""
        return train(self.job, callbacks=self.callbacks, network=self.mesh)


def _source(model: str | ModelSource | Callable[[], nn.Module], data: object, loss: str | Loss | None) -> ModelSource:
    if isinstance(model, str) and not callable(loss):
        return named(model, loss)
    if not callable(model) and loss is not None:
        raise UserError(
            "a loss of a program's own is for a model that is a function, or for `file.py:function` in a file"
        )
    samples = data.get("training") if isinstance(data, Mapping) else data
    example = partial(_first, samples) if getattr(samples, "as_forward", False) else None
    return GivenModel.of(model, example, loss) if callable(model) else cast(ModelSource, model)


def _first(samples: Any, count: int, sequence: int, seed: int) -> dict[str, Tensor]:
    """The samples with which the model is checked."""
    found: dict[str, Tensor] = samples.batch(torch.arange(count))
    return found
