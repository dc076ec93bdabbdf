"""A job: what is trained, on what, how, and for how long. A value that is read without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cubeloom import models
from cubeloom.base import dtypes
from cubeloom.base.grid import Grid
from cubeloom.base.limits import COMM_CHANNELS, SAMPLES, duration, within
from cubeloom.comm.kinds import CPU, Kind
from cubeloom.models.configs import BERTConfig, Config, LanguageConfig
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.train.job.rates import Rate
from cubeloom.train.job.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    GuardSettings,
    LayoutSettings,
    MetricsSettings,
    ModelSettings,
    OptimizerSettings,
    RateSettings,
    ScheduleSettings,
)
from cubeloom.train.job.vocabulary import vocabulary_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from cubeloom.models import ModelSource
    from cubeloom.pipeline.runtime.build import StagePlan
    from cubeloom.train.data import Samples
    from cubeloom.train.optimizers import Builder


@dataclass(frozen=True, kw_only=True)
class Job:
    """The contents of a settings file. Every field can also be given on the command line, as `--a.b c`."""

    folder: Path = Path("runs/cubeloom")
    """The folder of the run: its settings, metrics, checkpoints and report."""
    steps: int = 100
    """The number of training steps."""
    seed: int = 0
    """The seed of initial weights, data order and dropout."""
    dtype: dtypes.Trained = "float32"
    """The dtype of weights and activations; bf16 means bfloat16. With bfloat16 the optimizer keeps float32 master
    weights.
    """
    device: Kind = CPU
    """What a rank computes on: a core, or a GPU."""
    deterministic: bool = False
    """Use only operations that give the same bits each time."""
    patience: float = 300
    """Seconds that a rank waits for another before it ends the job."""
    grace: float = 25
    """Seconds that a rank has after a SIGTERM to finish its step and write a checkpoint; then it is killed. Launchers
    have their own limit; torch's is 30 s.
    """
    num_comm_channels: int | None = None
    """Communicators over which large collectives are split; by default two if ranks share a GPU, otherwise one."""
    restarts: int = 3
    """How often a failed job is restarted from its last checkpoint."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    batch: Batch = field(default_factory=lambda: Batch(samples=8, sequence=64))
    grid: Grid = field(default_factory=Grid)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    layout: LayoutSettings = field(default_factory=LayoutSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    rate: RateSettings = field(default_factory=RateSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)

    def __post_init__(self) -> None:
        within("steps", self.steps)
        within("restarts", self.restarts, least=0)
        duration("patience", self.patience)
        duration("grace", self.grace)
        if self.num_comm_channels is not None:
            within("num_comm_channels", self.num_comm_channels, most=COMM_CHANNELS)
        within("batch.samples", self.batch.samples, most=SAMPLES)
        within("batch.sequence", self.batch.sequence)

    SHORT: ClassVar = {"lr": "rate.peak"}
    """Other names of settings."""

    def config(self) -> Config | None:
        """The preset with its changes; None for any other model. If no vocabulary size is given, it is that of the
        data.
        """
        found = self.model.config()
        # The checkpoint that it starts from determines its vocabulary, too.
        said = self.model.vocab is not None or self.model.start is not None
        if said or not isinstance(found, LanguageConfig):
            return found
        # A mask token that does not occur in text.
        vocabulary = vocabulary_of(self.data, more=isinstance(found, BERTConfig))
        return found if vocabulary is None else replace(found, vocab=vocabulary)

    def source(self) -> ModelSource:
        """The model that is trained."""
        found = self.config()
        return self.model.source() if found is None else models.OurModel(found, self.model.called)

    def given_samples(self, part: str) -> Samples | None:
        """Samples that a program gave; None if the settings name the data."""
        return None

    @property
    def given_optimizer(self) -> Builder | None:
        """A function of a program that makes the optimizer; None if the settings name it."""
        return None

    def skeleton(self) -> nn.Module:
        """The model without values."""
        return models.skeleton(self.source())

    def laid_out(self) -> StagePlan:
        """The layers of each stage, with their specs. Raises UserError if the model cannot be cut this way."""
        from cubeloom.pipeline.runtime.build import plan_stages  # torch's part of a job, here and in `numbers`

        source, schedule = self.source(), self.schedule.schedule(self.grid.pipe)
        model = models.skeleton(source)
        ways = self.layout.ways
        return plan_stages(model, source.cut(model), self.grid, self.batch, schedule, self.rest, ways=ways)

    @property
    def rest(self) -> ShardingPolicy:
        """How operands are stored on the grid."""
        return self.layout.rest(self.source())

    @property
    def learning_rate(self) -> Rate:
        shape = self.rate
        return Rate(
            peak=shape.peak,
            steps=self.steps,
            warmup=shape.warmup,
            decay=shape.decay,
            floor=shape.floor,
            cooldown=shape.cooldown,
        )

    @property
    def numbers(self) -> torch.dtype:
        return dtypes.as_torch(self.dtype)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"
