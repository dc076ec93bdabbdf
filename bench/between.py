"""What a whole run of `train` takes beside its steps: to read the loss, write a line of metrics, and begin the next.

    OMP_NUM_THREADS=1 python bench/between.py                                  # a tiny model on two ranks of this machine
    OMP_NUM_THREADS=1 python bench/between.py --cuda --size 350M --grid x=1    # one rank on a GPU; several share it

On a GPU blocks are compiled, and stages recorded. No checkpoints are written. The first steps, which are slower, do not count.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

import tyro

from cubeloom import Grid
from cubeloom.launch import run
from cubeloom.launch.share_gpu import sharing
from cubeloom.parallel import Batch
from cubeloom.train.job import Job, check
from cubeloom.train.job.settings import LayoutSettings, ModelSettings, OptimizerSettings, ScheduleSettings
from cubeloom.train.loop import train
from cubeloom.train.metrics_logger import MetricsLogger
from cubeloom.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # `bench` is found also where this file is run by its name
from bench.gpu import SIZES, TINY
from bench.ours import our_sizes

FIRST = 6  # steps that do not count


@dataclass(frozen=True, kw_only=True)
class Between:
    """Measure what lies between the steps of a training."""

    size: Literal["tiny", "350M", "1.3B"] = "tiny"
    """As in bench/gpu.py."""
    grid: str = "data=2"
    schedule: str = "1f1b"
    microbatches: int = 1
    steps: int = 40
    cuda: bool = False
    masters: bool = False
    """Keep float32 masters of weights in bfloat16."""

    def __call__(self) -> int:
        with tempfile.TemporaryDirectory() as name:
            job = self._job(Path(name))
            check(job)
            with sharing(job.grid.world, job.device):
                seconds, when = run(job.grid.world, _trained, job, device=job.device)[0]
        steps = median(seconds[FIRST:])
        apart = median(after - before for before, after in pairwise(when[FIRST:]))
        print(f"{self.size} on {self.grid}: a step {1e3 * steps:.2f} ms, from step to step {1e3 * apart:.2f} ms")
        return 0

    def _job(self, folder: Path) -> Job:
        size = TINY if self.size == "tiny" else SIZES[self.size]
        return Job(
            folder=folder,
            steps=FIRST + self.steps,
            device="cuda" if self.cuda else "cpu",
            dtype="bfloat16" if self.cuda else "float32",
            model=ModelSettings(preset="gpt-tiny", **our_sizes(size)),
            batch=Batch(size.samples, size.sequence),
            grid=Grid.parse(self.grid),
            schedule=ScheduleSettings(name=self.schedule, microbatches=self.microbatches),
            layout=LayoutSettings(compile=self.cuda, record=self.cuda),
            optimizer=OptimizerSettings(fp32_master_weights=self.masters),
        )


def _trained(job: Job) -> tuple[list[float], list[float]]:
    """Of each step how long it took, and when it was written down."""
    seconds, when = [], []
    write = MetricsLogger.write

    def noted(self: MetricsLogger, step: int, stepped: Any, took: float, *more: Any) -> bool:
        seconds.append(took)
        when.append(time.perf_counter())
        return write(self, step, stepped, took, *more)

    with patch.object(MetricsLogger, "write", noted), patch.object(Trainer, "save", lambda _: None):
        train(job)
    return seconds, when


if __name__ == "__main__":
    raise SystemExit(tyro.cli(Between)())
