"""A job: what is trained, on what, how, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from cubeloom.base.grid import Grid
from cubeloom.base.limits import LANES, SAMPLES, patience, within
from cubeloom.comm import devices
from cubeloom.models import LanguageConfig, ModelSource, OurModel, skeleton
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.pipeline.runtime.build import StagePlan, plan_stages
from cubeloom.train.data import Samples
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

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Any field can be set in the file or as `--a.b=c`; an unknown one is refused with the nearest."""

    folder: Path = Path("runs/cubeloom")
    """Where the run is written: its settings, metrics, checkpoints and report."""
    steps: int = 100
    seed: int = 0
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Of weights and activations. In bfloat16 the optimizer has float32 weights of its own."""
    device: devices.Kind = devices.CPU
    deterministic: bool = False
    """Only operations that give the same bits each time."""
    patience: float = 300
    """Seconds that a rank waits for another before it ends the job."""
    grace: float = 25
    """Seconds that a rank has after a SIGTERM to end its step and write a checkpoint; then it is killed. Launchers themselves
    kill what has not ended, torch's after 30 s."""
    lanes: int | None = None
    """Communicators over which large sums and gathers are cut; by default two where ranks share a GPU, otherwise one."""
    restarts: int = 3
    """How often a job that failed is begun again from its last checkpoint."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    batch: Batch = field(default_factory=lambda: Batch(samples=8, sequence=64))
    """Of one step, over the whole grid."""
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
        patience("patience", self.patience)
        patience("grace", self.grace)
        if self.lanes is not None:
            within("lanes", self.lanes, most=LANES)
        within("batch.samples", self.batch.samples, most=SAMPLES)
        within("batch.sequence", self.batch.sequence)

    def source(self) -> ModelSource:
        """The model that is trained. Of a preset whose vocabulary nobody says, it is the data's."""
        found = self.model.source()
        # What it begins with has a vocabulary, too.
        said = self.model.vocab is not None or self.model.start is not None
        if said or not isinstance(found, OurModel) or not isinstance(found.config, LanguageConfig):
            return found
        # A token that no text has hides others.
        vocabulary = vocabulary_of(self.data, more=found.naming.task == "masked token")
        return found if vocabulary is None else OurModel(replace(found.config, vocab=vocabulary), found.preset)

    def given_samples(self, part: str) -> Samples | None:
        """Those that a program gave: none, where the settings say what is trained on."""
        return None

    def skeleton(self) -> nn.Module:
        """The model without values."""
        return skeleton(self.source())

    def laid_out(self) -> StagePlan:
        """Which stages have which layers, in which form; raises UserError if the model cannot be cut so."""
        source, schedule = self.source(), self.schedule.schedule(self.grid.pipe)
        model = skeleton(source)
        ways = self.layout.ways
        return plan_stages(model, source.cut(model), self.grid, self.batch, schedule, self.rest, ways=ways)

    @property
    def rest(self) -> ShardingPolicy:
        """How operands rest on the grid."""
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
        return DTYPES[self.dtype]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"
