"""Jobs to train in tests: float64, tiny, on random tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cubeloom import Grid
from cubeloom.parallel import Batch
from cubeloom.train.job import Job
from cubeloom.train.job.settings import CheckpointSettings, ModelSettings, RateSettings, ScheduleSettings

MODEL = ModelSettings(preset="gpt-tiny", vocab=64, positions=8, hidden=16, layers=2, heads=4, dropout=0.1)


def job(
    folder: Path, grid: str = "x=1", schedule: str = "1f1b", microbatches: int | None = 4, **changes: object
) -> Job:
    made = Job(
        folder=folder,
        steps=6,
        dtype="float64",
        patience=60,
        model=MODEL,
        batch=Batch(8, 8),
        grid=Grid.parse(grid),
        schedule=ScheduleSettings(name=schedule, microbatches=microbatches),
        rate=RateSettings(peak=1e-2, warmup=2),
        checkpoint=CheckpointSettings(every=2),
    )
    return replace(made, **changes)  # type: ignore[arg-type]
