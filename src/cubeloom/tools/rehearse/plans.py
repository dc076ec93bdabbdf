"""Rehearses the best plans of a search: compares what each moves and holds with the prediction, and refuses invalid
ones.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from cubeloom.base import dtypes
from cubeloom.base.errors import UserError
from cubeloom.base.settings.convert import convert
from cubeloom.comm.ledger import plain
from cubeloom.plan import hardware
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.model.derive import derive
from cubeloom.plan.model.found import found_model
from cubeloom.plan.search import Answer, Plan, configuration, search
from cubeloom.plan.search.configuration import planned_dtype
from cubeloom.plan.search.found_cut import search_found
from cubeloom.tools.rehearse.rehearsal import Rehearsal, rehearse
from cubeloom.tools.verify import Experiment
from cubeloom.train.job import Job

TRIES = 5  # the most plans rehearsed for each one requested
TOO_LARGE = "memory, rehearsed"
UNMATCHED = "ranks that do not fit together, rehearsed"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Tried:
    """A plan that was rehearsed."""

    plan: Plan
    rehearsal: Rehearsal
    predicted: dict[int, dict[str, Fraction]]  # the closed form's bytes, for each rank that was run
    room: float  # bytes available for tensors

    @property
    def refused(self) -> str | None:
        """Why it cannot run, if it cannot."""
        if not self.rehearsal.matched:
            return UNMATCHED
        return TOO_LARGE if self.peak > self.room else None

    @property
    def peak(self) -> int:
        """Bytes of tensors on the rank that needs most."""
        return max(run.memory.peak for run in self.rehearsal.runs)

    @property
    def bytes(self) -> dict[str, tuple[Fraction, Fraction]]:
        """For the first rank in a step, by axis: counted and predicted."""
        first = self.rehearsal.runs[0]
        predicted = self.predicted[first.rank]
        axes = sorted(first.bytes.keys() | predicted.keys())
        return {axis: (first.bytes.get(axis, Fraction(0)), predicted.get(axis, Fraction(0))) for axis in axes}

    @property
    def bytes_agree(self) -> bool:
        """On every rank that was run."""
        return all(
            run.bytes.get(axis, Fraction(0)) == self.predicted[run.rank].get(axis, Fraction(0))
            for run in self.rehearsal.runs
            for axis in run.bytes.keys() | self.predicted[run.rank].keys()
        )

    def as_json(self) -> dict[str, Any]:
        largest = max(self.rehearsal.runs, key=lambda run: run.memory.peak).memory
        return {
            "refused": self.refused,
            "ranks_run": len(self.rehearsal.runs),
            "bytes": {axis: {"counted": plain(c), "predicted": plain(p)} for axis, (c, p) in self.bytes.items()},
            "bytes_agree": self.bytes_agree,
            "memory": {
                "peak": largest.peak,
                "predicted": round(self.plan.total_memory),
                "room": round(self.room),
                "at_peak": {str(kind): size for kind, size in largest.at_peak.items()},
            },
            "matched": self.rehearsal.matched,
            "problems": list(self.rehearsal.problems),
            "seconds": round(self.rehearsal.seconds, 3),
        }


@dataclass(frozen=True)
class Rehearsed:
    """The answer without plans that cannot run; the rehearsed ones come first."""

    answer: Answer
    passed: tuple[Tried, ...]
    failed: tuple[Tried, ...]

    def as_json(self, top: int) -> dict[str, Any]:
        found = self.answer.as_json(top)
        for entry, tried in zip(found["plans"], self.passed, strict=False):
            entry["rehearsed"] = tried.as_json()
        found["failed"] = [self.answer.entry(tried.plan) | {"rehearsed": tried.as_json()} for tried in self.failed]
        return found


def rehearsed(answer: Answer, count: int, base: Job | None = None, tell: Tell | None = None) -> Rehearsed:
    """Rehearse plans from the best on, until `count` of them can run. Others are refused, and the next ones move up.

    `base`: the planned job, if it was not a preset. `tell` is called before each rank is run.
    """
    passed: list[Tried] = []
    failed: list[Tried] = []
    for plan in answer.plans[: TRIES * count]:
        what = f"plan {len(passed) + 1} of {count}, {plan.grid} {plan.shape.title}"
        tried = _tried(answer, plan, base, None if tell is None else _prefixed(tell, what))
        (failed if tried.refused else passed).append(tried)
        if len(passed) == count:
            break
    rest = answer.plans[len(passed) + len(failed) :]
    refused = Counter(tried.refused for tried in failed if tried.refused)
    left = replace(
        answer,
        plans=(*(tried.plan for tried in passed), *rest),
        refused={**answer.refused, **refused},
    )
    return Rehearsed(left, tuple(passed), tuple(failed))


def cluster_of(job: Job, name: str) -> Cluster:
    """The cluster, with what the job's optimizer keeps on a device."""
    found, settings = hardware.cluster(name), job.optimizer
    moments = None if settings.moments is None else dtypes.as_torch(settings.moments).itemsize
    return replace(
        found,
        software=replace(
            found.software, fp32_master_weights=settings.fp32_master_weights, moments=moments, offload=settings.offload
        ),
    )


def planned(job: Job, cluster: str, devices: int) -> Job:
    """The job as the planner would run it on at most this many devices of a cluster: on as many as can be used."""
    dtype = planned_dtype(job.dtype)
    source = job.source()
    find: Callable[..., Answer]
    if source.traced:
        find = partial(
            search_found, found_model(job.model.called, job.model.called, lambda: source, job.batch.sequence)
        )
    else:
        find = partial(search, derive(job.model.called, source))
    machine = cluster_of(job, cluster)
    for count in range(devices, 0, -1):
        layout = job.layout
        options = {"record": layout.record, "gradients": layout.gradients, "precision": layout.precision}
        answer = find(machine, count, job.batch.samples, job.batch.sequence, dtype, **options)
        if answer.plans:
            return replace(job_of(answer, answer.plans[0], job), device=job.device)  # on the device of the job
    raise UserError(f"the job fits on no {devices} devices of {cluster} or fewer: {dict(answer.refused)}")


def job_of(answer: Answer, plan: Plan, base: Job | None = None) -> Job:
    """A job with the plan's settings; the others are those of the planned job."""
    made = convert(Job, tomllib.loads(configuration(answer, plan)))
    if base is None:
        return made
    return replace(
        base,
        dtype=made.dtype,
        device=base.device if answer.cluster.device.kind is None else made.device,
        batch=made.batch,
        grid=made.grid,
        schedule=made.schedule,
        layout=replace(made.layout, compile=base.layout.compile),
        optimizer=replace(base.optimizer, shard_optimizer_state=made.optimizer.shard_optimizer_state),
    )


def _tried(answer: Answer, plan: Plan, base: Job | None, tell: Tell | None) -> Tried:
    job = job_of(answer, plan, base)
    # The first step creates the optimizer state and learns the order of weights; later steps are like the second.
    experiment = Experiment.of_job(job, steps=2, dtype=job.numbers)

    def next_rank(number: int, of: int) -> None:
        if tell is not None:
            tell(f"rank {number + 1} of {of}")

    found = rehearse(experiment, tell=next_rank)
    workers = {run.rank: job.grid.coordinates(run.rank) for run in found.runs}
    predicted = {rank: answer.bytes(plan, at["pipe"], (at["x"], at["y"])) for rank, at in workers.items()}
    return Tried(plan, found, predicted, answer.task.room(answer.cluster))


def _prefixed(tell: Tell, what: str) -> Tell:
    return lambda text: tell(f"{what}: {text}")
