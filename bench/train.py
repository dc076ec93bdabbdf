"""What training costs beside the steps: checkpoints, and waiting for data.

    OMP_NUM_THREADS=1 python bench/train.py            # or --quick

The same job on the same ranks, with a checkpoint every 50 steps and with none, in turn; and how long steps waited for data.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import tyro

from cubeloom import Grid
from cubeloom.comm import Network, devices
from cubeloom.launch import RankPool
from cubeloom.parallel import Batch
from cubeloom.train.data import Request, prepare
from cubeloom.train.job import Job
from cubeloom.train.job.settings import DataSettings, ModelSettings, Source
from cubeloom.train.trainer import Trainer

EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure what checkpoints and the loader cost."""

    grid: str = "x=2"
    steps: int = 100
    rounds: int = 3
    quick: bool = False
    """Few steps of a small model, for our tests."""
    json: bool = False

    def __call__(self) -> int:
        with tempfile.TemporaryDirectory() as name, RankPool(Grid.parse(self.grid).world) as pool:
            job = _job(Path(name), self.grid, self.quick)
            steps = 4 if self.quick else self.steps
            every = 2 if self.quick else EVERY
            with_, without, waited = [], [], []
            for number in range(1 if self.quick else self.rounds):
                kept = replace(job, folder=Path(name) / f"kept-{number}")
                plain, _ = pool.run(job.grid.world, _train, job, steps, None, timeout=900)[0]
                saving, wait = pool.run(job.grid.world, _train, kept, steps, every, timeout=900)[0]
                without.append(plain)
                with_.append(saving)
                waited.append(wait)
        cost = median(with_) / median(without) - 1
        print(
            f"{steps} steps: {median(without):.2f} s; with a checkpoint every {every}: {median(with_):.2f} s, {cost:+.1%}"
        )
        print(
            f"waited for data: {max(waited) * 1e3:.1f} ms in {steps} steps, {max(waited) / median(with_):.2%} of the time"
        )
        if self.json:
            print(json.dumps({"checkpoint_cost": cost, "waited_s": max(waited), "seconds": median(with_)}))
        return 0


def _job(folder: Path, grid: str, quick: bool) -> Job:
    text = folder / "text.txt"
    text.write_text("".join(chr(32 + (7 * place * place) % 90) for place in range(200_000)))
    prepare(Request(inputs=(text,)), folder / "tokens")
    tiny = ModelSettings(preset="gpt-tiny", vocab=260)
    return Job(
        folder=folder / "run",
        model=tiny if quick else replace(tiny, hidden=192, layers=4, heads=8),
        data=DataSettings(sources=(Source(folder=folder / "tokens"),)),
        batch=Batch(8, 16 if quick else 64),
        grid=Grid.parse(grid),
    )


def _train(job: Job, steps: int, every: int | None) -> tuple[float, float]:
    """Seconds of so many steps, the last checkpoint's writing included, and those waited for data."""
    trainer = Trainer(job, Network(job.grid, devices.current(job.device)))
    trainer.step()  # the first one is slower
    trainer.network.barrier()
    waited, began = trainer.waited, time.perf_counter()
    for number in range(1, steps + 1):
        trainer.step()
        if every is not None and number % every == 0:
            trainer.save()
    waited = trainer.waited - waited
    trainer.close()
    trainer.network.barrier()
    return time.perf_counter() - began, waited


if __name__ == "__main__":
    raise SystemExit(tyro.cli(Bench)())
