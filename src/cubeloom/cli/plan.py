"""`cubeloom plan`: the best decomposition of a model over a cluster's devices, and why it is the best."""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from cubeloom.base.errors import UserError, counted
from cubeloom.base.files import write_asked
from cubeloom.base.grid import Grid
from cubeloom.base.lazy import uncollected
from cubeloom.launch.environment import current, membership
from cubeloom.parallel.config import Precision
from cubeloom.plan.hardware import Cluster, Dtype
from cubeloom.plan.model import Model, names
from cubeloom.plan.model.found import FoundModel, found_model
from cubeloom.plan.search import (
    Answer,
    configuration,
    counts_that_work,
    explain,
    on_devices,
    planned_dtype,
    search,
)

if TYPE_CHECKING:
    from cubeloom.models import ModelSource
    from cubeloom.tools.measure import Measured
    from cubeloom.tools.rehearse import Rehearsed
    from cubeloom.train.job import Job

_TOP = 10  # plans in JSON, where nobody says how many


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Find the best grid, placement, schedule, micro-batch and rests for a model on so many devices of a cluster.

    Every decomposition is weighed in closed form, the best hundreds are simulated. Needs no device and no process group.
    """

    file: tyro.conf.Positional[Path | None] = None
    """A settings file: its model and batch, and as many devices as its grid has; --a.b=c changes them. A Python
    recipe (.py) is executed."""
    model: str | None = None
    """A preset, such as gpt-80b; a Hugging Face folder, with or without weights; or file.py:function, which is executed."""
    cluster: str
    """A cluster that cubeloom knows, such as perlmutter, or a TOML file that `cubeloom calibrate` wrote."""
    devices: int | None = None
    global_batch: int | None = None
    """Samples in a step."""
    sequence: int | None = None
    """Tokens of a sample; the longest that the model takes by default."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Of weights and activations; bf16 is bfloat16. The file's by default, or bfloat16."""
    gradients: Literal["float32", "model"] = "float32"
    """Of bfloat16 weights: accumulated and reduced in float32, or in bfloat16; a FILE's own `layout.gradients`, if it says."""
    precision: Precision = "model"
    """fp8: the operands of the blocks' linears are rounded to FP8; a FILE's own `layout.precision`, if it says."""
    reserve: float = 0.08
    """The share of a device's memory that is left to what lies below tensors."""
    record: bool = False
    """Stages are recorded as CUDA graphs wherever they can be (layout.record), so that the host's time is no plan's concern."""
    top: int | None = None
    """Show so many of the best plans, however alike; by default strategies that differ, and the usual ones beside them."""
    rehearse: int = 0
    """Run the true programs of so many of the best plans, without a network and values: what each moves and holds. A plan
    that needs more memory than a device has, or whose ranks do not fit together, is refused, and the next moves up."""
    measure: int = 0
    """Train so many of the best plans that differ for some steps each, on this machine or on the ranks that torchrun or
    srun started, and rank again by measured time."""
    write_cluster: Path | None = None
    """With --measure: write the cluster, corrected by what was measured, as a file for --cluster."""
    share_gpu: bool = False
    """With --measure: let ranks share this machine's GPUs."""
    explain: str | None = None
    """A grid, as pipe=8,data=16,z=1,y=2,x=4: say why it lost."""
    html: Path | None = None
    """Write a report: ranking, break-downs, the best one's timeline, other numbers of devices."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the settings file that runs the best plan."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object instead of the table."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        answer = self._answer()
        tried = self._rehearsed(answer) if self.rehearse else None
        answer = answer if tried is None else tried.answer
        predicted, trained = answer, self._measured(answer) if self.measure else None
        if trained is not None and not _first_rank():
            return 0 if trained.trained else 1
        answer = answer if trained is None else trained.answer
        explained = None if self.explain is None else explain(answer, Grid.parse(self.explain))
        if self.output is not None:
            self._needs_one(answer)
            write_asked(self.output, self._settings(answer))
        if self.html is not None:
            self._needs_one(answer)
            from cubeloom.plan.report import page

            write_asked(self.html, page(answer, [on_devices(answer, count) for count in self._counts(answer)]))
        if self.json:
            print(json.dumps((trained or tried or answer).as_json(self.top or _TOP)))
        elif explained is not None:
            print(explained.text)
        else:
            self._show(answer if trained is None else predicted)
            for line in [] if tried is None else _compared(tried):
                print(line)
            for line in [] if trained is None else _trained(trained):
                print(line)
        failed = trained is not None and not trained.trained
        return 0 if answer.plans and not failed else 1

    def _answer(self) -> Answer:
        model, devices, samples, sequence = self._asked()
        layout = None if self._job is None else self._job.layout
        asked = self._cluster(), devices, samples, sequence, self._dtype()
        options: dict[str, Any] = {
            "reserve": self.reserve,
            "record": self.record or (layout is not None and layout.record),
            "gradients": self.gradients if layout is None else layout.gradients,
            "precision": self.precision if layout is None else layout.precision,
        }
        if isinstance(model, Model | str):
            return search(model, *asked, **options)
        if self.html is not None:
            raise UserError("--html is for presets so far: the cut of this model is found for each number of devices")
        from cubeloom.plan.search.found_cut import search_found

        explained = [] if self.explain is None else [Grid.parse(self.explain)]
        planes = {(grid.x, grid.y) for grid in explained}
        show = max(self.top or _TOP, 5 * self.rehearse)
        return search_found(model, *asked, show=show, planes=planes, **options)

    def _cluster(self) -> Cluster | str:
        """With what the optimizer of a FILE keeps."""
        if self._job is None:
            return self.cluster
        from cubeloom.tools.rehearse.plans import cluster_of

        return cluster_of(self._job, self.cluster)

    def _asked(self) -> tuple[Model | FoundModel | str, int, int, int | None]:
        """Model, devices, samples and sequence: of the options, or of a file."""
        for option, count in (("--rehearse", self.rehearse), ("--measure", self.measure)):
            if count < 0:
                raise UserError(f"{option} {count}: a number of plans, from 0 up")
        if self.rehearse and self.measure:
            raise UserError("give --rehearse or --measure, not both: what trains need not be rehearsed")
        if not self.measure and (self.write_cluster is not None or self.share_gpu):
            raise UserError("--write-cluster and --share-gpu are for --measure")
        if self.write_cluster is not None and not self.write_cluster.parent.is_dir():
            raise UserError(f"no folder {self.write_cluster.parent} to write {self.write_cluster.name} in")
        if self.file is not None:
            if self.output is not None and self.output.resolve() == self.file.resolve():
                raise UserError(
                    f"-o {self.output} would take the place of the file that is planned for: give it another name"
                )
            if self.model is not None:
                raise UserError("give a FILE or --model, not both")
            return self._of_job(self.file.stem)
        if self.model is None or self.devices is None or self.global_batch is None:
            raise UserError("give a FILE, or --model, --devices and --global-batch")
        if self.model in names():
            return self.model, self.devices, self.global_batch, self.sequence
        return self._derived(self.model, self.model, self.sequence), self.devices, self.global_batch, self.sequence

    def _derived(self, name: str, called: str, sequence: int | None, job: Job | None = None) -> Model | FoundModel:
        """`called`: as the user calls the model, which a job may change."""

        # Torch is imported where it is needed: its import takes longer than planning.
        def source() -> ModelSource:
            from cubeloom.models.named import named

            return named(called) if job is None else job.source()

        with uncollected():
            if (Path(called) / "config.json").is_file() or source().traced:
                return found_model(name, called, source, sequence)
        from cubeloom.plan.model.derive import derive

        return derive(name, source())

    @cached_property
    def _job(self) -> Job | None:
        """What the file says, if one was given."""
        if self.file is None:
            return None
        from cubeloom.base.settings import load
        from cubeloom.train.job import Job

        return load(Job, self.file, self.overrides)

    def _dtype(self) -> Dtype:
        said = self.dtype or ("bfloat16" if self._job is None else self._job.dtype)
        return planned_dtype(said)

    def _of_job(self, name: str) -> tuple[Model | FoundModel, int, int, int]:
        job = self._job
        assert job is not None
        model = self._derived(name, job.model.called, self.sequence or job.batch.sequence, job)
        devices, samples = self.devices or job.grid.world, self.global_batch or job.batch.samples
        return model, devices, samples, self.sequence or job.batch.sequence

    def _settings(self, answer: Answer) -> str:
        """Of the best plan. Of a job that was given, all of it: what the plan leaves out must not be the file's."""
        if self._job is None:
            return configuration(answer, answer.plans[0])
        from cubeloom.base.settings import write
        from cubeloom.tools.rehearse.plans import job_of

        return write(job_of(answer, answer.plans[0], self._job))

    def _rehearsed(self, answer: Answer) -> Rehearsed:
        from cubeloom.tools.rehearse import rehearsed

        return rehearsed(answer, self.rehearse, self._job, _Told())

    def _measured(self, answer: Answer) -> Measured:
        self._needs_one(answer)
        from cubeloom.base import host
        from cubeloom.plan.hardware import written
        from cubeloom.plan.validate.remeasured import remeasured
        from cubeloom.tools.measure import measured

        told = partial(print, file=sys.stderr, flush=True) if _first_rank() else (lambda _: None)
        found = measured(answer, self.measure, self._job, self.share_gpu, lambda text: told(f"training {text}"))
        if self.write_cluster is not None and found.trained and _first_rank():
            source = f"cubeloom plan --measure {len(found.trained)} of {answer.model.name} on {platform.node()}, "
            source += f"{time.strftime('%Y-%m-%d')}, torch {host.version('torch')}"
            plans, seconds = zip(*((each.plan, each.seconds) for each in found.trained), strict=True)
            write_asked(self.write_cluster, written(remeasured(answer, plans, seconds, source)))
        return found

    def _needs_one(self, answer: Answer) -> None:
        if not answer.plans:
            raise UserError(f"no decomposition can run; refused were {dict(answer.refused)}")

    def _counts(self, answer: Answer) -> list[int]:
        """Numbers of devices around the one asked for."""
        devices = answer.task.devices
        around = [devices * 2**power // 8 for power in range(5)]
        return [count for count in around if 1 <= count <= answer.cluster.devices and count != devices]

    def _show(self, answer: Answer) -> None:
        from cubeloom.plan.report import words

        print("\n".join(words(answer, self.top)))
        if not answer.plans:
            print(_none_can_run(answer))


class _Told:
    """A line on the error stream for each rank that is run, once that takes longer than a few seconds."""

    def __init__(self, patience: float = 3.0) -> None:
        self._began = time.perf_counter()
        self._patience = patience

    def __call__(self, text: str) -> None:
        took = time.perf_counter() - self._began
        if took > self._patience:
            print(f"rehearsing {text}, {took:.0f} s so far", file=sys.stderr, flush=True)


def _compared(found: Rehearsed) -> list[str]:
    """What came of each plan that was rehearsed, beside what was predicted."""
    lines = []
    for tried in (*found.passed, *found.failed):
        plan, ran = tried.plan, tried.rehearsal
        verdict = f"refused: {tried.refused}" if tried.refused else "runs"
        lines.append(
            f"rehearsed {plan.grid} {plan.shape.title}: {verdict}; {counted(len(ran.runs), 'rank')} run in {ran.seconds:.1f} s"
        )
        lines.append(
            f"  peak of tensors {tried.peak / 1e9:.4g} GB, predicted {plan.total_memory / 1e9:.4g}, "
            f"room for {tried.room / 1e9:.4g}"
        )
        moved = ", ".join(
            f"{axis} {float(counted):,.0f}" + ("" if counted == expected else f" (predicted {float(expected):,.0f})")
            for axis, (counted, expected) in tried.bytes.items()
        )
        lines.append(
            f"  bytes {'are' if tried.bytes_agree else 'ARE NOT'} as predicted on all of them; rank 0: {moved}"
        )
        lines += [f"  {problem}" for problem in ran.problems]
    return lines


def _trained(found: Measured) -> list[str]:
    """What each plan that was trained took, beside what was predicted; the fastest first."""
    from cubeloom.plan.report.words import time as shown

    lines = ["", f"trained {counted(len(found.trained), 'plan')}:", "    measured  predicted"]
    for place, each in enumerate(found.trained, start=1):
        lines.append(
            f"{place:>2} {shown(each.seconds):>9} {shown(each.plan.seconds):>10} {each.off:>+6.0%}  "
            f"{each.plan.grid} {each.plan.shape.title} {each.plan.microbatches}×{each.plan.microbatch}"
        )
    for each in found.failed:
        lines.append(f"did not train: {each.plan.grid} {each.plan.shape.title}: {each.failed.splitlines()[-1]}")
    return lines


def _first_rank() -> bool:
    here = membership(current())
    return here is None or here.rank == 0


def _none_can_run(answer: Answer) -> str:
    devices = counted(answer.task.devices, "device")
    found = counts_that_work(answer)
    if found:
        return f"none can run on {devices}: the nearest numbers that work are {' and '.join(f'{n:,}' for n in found)}"
    return f"none can run on {devices}: more devices, a smaller batch or a smaller model may"
