"""Measured plans: the ranking by measured time, and what they say of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from cubeloom.base.errors import UserError, counted
from cubeloom.comm import devices, world
from cubeloom.launch import RankFailed, RankPool
from cubeloom.launch.environment import Membership, current, membership
from cubeloom.launch.ready import check_startable, join
from cubeloom.launch.share_gpu import sharing
from cubeloom.plan.hardware.measured import undisturbed
from cubeloom.plan.search import Answer, Plan, different
from cubeloom.tools.measure.steps import step_times
from cubeloom.tools.rehearse.plans import job_of
from cubeloom.train.job import Job, check

STEPS = 8  # that are timed, of each plan
TRIES = 3  # the most plans tried for each one requested
_TIMEOUT = 600.0  # seconds for the steps of one plan
Tell = Callable[[str], None]
StepTimes = Callable[[Job, int], list[float]]


@dataclass(frozen=True)
class Trained:
    """A plan that was trained."""

    plan: Plan
    times: tuple[float, ...]  # seconds of each step
    failed: str = ""  # why it did not train, if so

    @property
    def seconds(self) -> float:
        return undisturbed(self.times)

    @property
    def off(self) -> float:
        """The prediction over the measured time, less 1."""
        return self.plan.seconds / self.seconds - 1

    def as_json(self) -> dict[str, Any]:
        if self.failed:
            return {"failed": self.failed}
        return {"step_s": self.seconds, "least_s": min(self.times), "most_s": max(self.times), "steps": len(self.times)}


@dataclass(frozen=True)
class Measured:
    """The answer with the measured plans first, the fastest first; without those that failed."""

    answer: Answer
    trained: tuple[Trained, ...]  # in that order
    failed: tuple[Trained, ...]

    def as_json(self, top: int) -> dict[str, Any]:
        found = self.answer.as_json(top)
        for entry, each in zip(found["plans"], self.trained, strict=False):
            entry["measured"] = each.as_json()
        found["failed"] = [self.answer.entry(each.plan) | {"measured": each.as_json()} for each in self.failed]
        return found


def measured(
    answer: Answer, count: int, base: Job | None = None, share_gpu: bool = False, tell: Tell = lambda _: None
) -> Measured:
    """Train plans that differ, from the best on, until `count` of them did. `base`: the planned job, if it was one.

    Called by every rank of a job that a launcher started; without one, ranks are started on this machine.
    """
    plans = list({id(plan): plan for plan in (*different(answer, count), *answer.plans)}.values())
    passed: list[Trained] = []
    failed: list[Trained] = []
    first = job_of(answer, answer.plans[0], base)
    with _ranks(first, share_gpu) as times:
        for plan in plans[: TRIES * count]:
            tell(f"plan {len(passed) + 1} of {count}, {plan.grid} {plan.shape.title}")
            found = _trained(answer, plan, base, times)
            (failed if found.failed else passed).append(found)
            if len(passed) == count:
                break
    passed.sort(key=lambda each: each.seconds)
    tried = {id(each.plan) for each in (*passed, *failed)}
    rest = (plan for plan in answer.plans if id(plan) not in tried)
    return Measured(replace(answer, plans=(*(each.plan for each in passed), *rest)), tuple(passed), tuple(failed))


def _trained(answer: Answer, plan: Plan, base: Job | None, times: StepTimes) -> Trained:
    job = job_of(answer, plan, base)
    # A run of that name is not resumed: this one has none.
    job = replace(job, folder=job.folder.with_name(f"{job.folder.name}.measured"))
    try:
        check(job)
        return Trained(plan, tuple(times(job, STEPS)))
    except (RankFailed, UserError) as error:
        return Trained(plan, (), str(error))


@contextmanager
def _ranks(job: Job, share_gpu: bool) -> Iterator[StepTimes]:
    """The ranks that train: those of this process's job, or new ones on this machine."""
    here = membership(current())
    if here is not None:
        _check_world(job, here)
        join(here, job.device, job.patience)
        yield step_times
        world.leave()
        return
    size, kind = job.grid.world, job.device
    check_startable(size)
    have = devices.count(kind)
    if not devices.available(kind):
        raise UserError(f"--measure: the plans are for device {kind!r}, of which torch sees none here")
    if kind != devices.CPU and size > have and not share_gpu:
        raise UserError(
            f"--measure: the plans are for {counted(size, 'device')}, and this machine has {counted(have, 'GPU')}; start "
            f"the command on {counted(size, 'rank')} with torchrun or srun, or let ranks share with --share-gpu"
        )
    with sharing(size, kind), RankPool(size, kind) as pool:
        num_comm_channels = devices.num_comm_channels(kind, size)

        def times(job: Job, steps: int) -> list[float]:
            found: list[float] = pool.run(size, step_times, job, steps, num_comm_channels, timeout=_TIMEOUT)[0]
            return found

        yield times


def _check_world(job: Job, here: Membership) -> None:
    if here.world != job.grid.world:
        raise UserError(
            f"--measure: the plans are for {counted(job.grid.world, 'device')}, and {here.by} started {here.world} ranks; "
            f"give --devices {here.world}"
        )
