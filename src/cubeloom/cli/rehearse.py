"""`cubeloom rehearse`: runs the real program of a job's distinct ranks on this machine alone, and reports what it
needs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from cubeloom.base.errors import UserError
from cubeloom.base.settings import load
from cubeloom.base.units import bytes_
from cubeloom.cli.verify import Verify
from cubeloom.parallel import Batch
from cubeloom.train.job.job import Job

if TYPE_CHECKING:
    from cubeloom.tools.rehearse import Rehearsal
    from cubeloom.tools.verify import Experiment


@dataclass(frozen=True, kw_only=True)
class Rehearse(Verify):
    """Run the real program of a job's distinct ranks in this process, without a network, at any size.

    Reports what each rank would receive in a step, the memory that its tensors would take, and whether the
    communications of all ranks match. Exits 0 if they do, 1 if not, 2 if the request is invalid.
    """

    ranks: Annotated[int | None, tyro.conf.arg(aliases=["--world"])] = None
    """Number of ranks: the data axis, and the batch with it, are resized to it. By default the grid's own."""
    rank: int | None = None
    """The rank to report on; by default the one that needs most memory."""
    real: bool = False
    """Compute with real tensors on the device, and measure the time; otherwise tensors have shapes and no values."""
    dtype: Literal["float64", "float32", "bfloat16"] | None = None  # type: ignore[assignment]
    """The dtype; by default that of a FILE, and float64 without one."""
    steps: int = 2
    """The first step creates the optimizer state and learns the order of weights; later steps are like the second."""
    load: tyro.conf.Suppress[Path | None] = None
    patience: tyro.conf.Suppress[float] = 120
    share_gpu: tyro.conf.Suppress[bool] = False

    def experiment(self) -> Experiment:
        # Options that conflict with a file are looked up among those of `verify`.
        given = {field.name: getattr(self, field.name) for field in fields(Verify)}
        if self.dtype is None:
            given["dtype"] = Verify.dtype if self.file is None else load(Job, self.file, self.overrides).dtype
        found = Verify(**given).experiment()
        return found if self.ranks is None else of_size(found, self.ranks)

    def __call__(self) -> int:
        from cubeloom.tools.rehearse import rehearse

        ranks = None if self.rank is None else [self.rank]
        found = rehearse(self.experiment(), ranks, real=self.real, device=self.device)
        Console(stderr=self.json).print(memory_table(found), received_table(found), fit(found), sep="\n")
        if self.json:
            print(json.dumps(found.as_json()))
        return 0 if found.matched else 1


def of_size(experiment: Experiment, world: int) -> Experiment:
    """The same job on more or fewer ranks, with the same number of samples per rank."""
    grid = experiment.grid
    copy = grid.world // grid.data  # ranks per copy of the model
    if world < 1 or world % copy:
        nearest = max(1, round(world / copy)) * copy
        raise UserError(f"--ranks {world}: a copy of the model is on {copy} ranks ({grid}); the nearest is {nearest}")
    data = world // copy
    samples = experiment.batch.samples // grid.data * data
    batch = Batch(samples, experiment.batch.sequence)
    return replace(experiment, grid=replace(grid, data=data), batch=batch)


def memory_table(found: Rehearsal) -> Table:
    from cubeloom.tools.rehearse.memory import KINDS

    timed = any(run.compute_s is not None for run in found.runs)
    hosted = max(run.memory.host for run in found.runs)
    caption = f"and at most {bytes_(hosted)} of a rank in the host's memory" if hosted else None
    table = Table(title="Memory of tensors, and what the peak is", caption=caption, box=None, pad_edge=False)
    for name in ("rank", "peak", *KINDS, *(["compute"] if timed else [])):
        table.add_column(name, justify="right")
    for run in found.runs:
        sizes = (run.memory.peak, *(run.memory.at_peak[kind] for kind in KINDS))
        compute = [] if run.compute_s is None else [f"{run.compute_s * 1000:.1f} ms"]
        table.add_row(str(run.rank), *map(bytes_, sizes), *compute)
    return table


def received_table(found: Rehearsal) -> Table:
    from cubeloom.comm.ledger import plain

    table = Table("axis", "bytes", title=f"Bytes that rank {found.chosen.rank} receives in a step")
    for axis, size in found.chosen.bytes.items():
        table.add_row(axis, f"{plain(size):,}")
    return table


def fit(found: Rehearsal) -> str:
    world, run = found.experiment.grid.world, len(found.runs)
    head = f"ran {run} of {world} ranks in {found.seconds:.1f} s; "
    if found.matched:
        return head + f"the communications of all {world} fit together"
    return head + "\n".join(["THE RANKS DO NOT FIT TOGETHER:", *found.problems])
