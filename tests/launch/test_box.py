"""Several machines with faults: a run goes on with the curve of the undisturbed one, or ends on all hosts and says why."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_in_a_box import Box, Host, why_not
from cubeloom import Grid
from cubeloom.launch import RankPool
from cubeloom.parallel import Batch
from cubeloom.train.job import Job
from cubeloom.train.job.settings import CheckpointSettings, ModelSettings, RateSettings, ScheduleSettings
from cubeloom.train.loop import train
from cubeloom.train.metrics.log import read_log

from .boxed_job import JOIN, BoxedJob, send

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no cluster in a box: {why_not()}")

PATIENCE = 10.0  # seconds that ranks wait for each other
RESUMES = PATIENCE + 60  # until the next attempt trains, with the start of new processes on a busy machine
STEPS, EVERY = 60, 6
# Grids of two to four hosts, with the ranks of each.
GRIDS = [("data=2", 1), ("z=2", 1), ("pipe=2", 1), ("data=3", 1), ("pipe=2,data=2", 1), ("x=2,y=2", 2), ("z=2,y=2", 2)]
NAMES_ALL = re.compile(r"rank \d+ of \d+ on (host\d+): \S.*")

Chance = random.Random
Fault = Callable[[BoxedJob, Chance], Host | None]
"""Gives the host all of whose processes it killed for good: that one cannot say anything."""


def _job(folder: Path, grid: str) -> Job:
    return Job(
        folder=folder,
        steps=STEPS,
        dtype="float64",
        patience=PATIENCE,
        grace=5,
        restarts=6,
        model=ModelSettings(preset="gpt-tiny", vocab=64, positions=8, hidden=16, layers=4, heads=4, dropout=0.1),
        batch=Batch(12, 8),
        grid=Grid.parse(grid),
        schedule=ScheduleSettings(name="1f1b", microbatches=2),
        rate=RateSettings(peak=1e-2, warmup=2),
        checkpoint=CheckpointSettings(every=EVERY),
    )


def _any_rank(boxed: BoxedJob, chance: Chance) -> int:
    found = [rank for host in boxed.agents for rank in boxed.ranks(host)]
    return chance.choice(found)


def kill_a_rank(boxed: BoxedJob, chance: Chance) -> None:
    send(_any_rank(boxed, chance), signal.SIGKILL)


def stop_a_rank(boxed: BoxedJob, chance: Chance) -> None:
    send(_any_rank(boxed, chance), signal.SIGSTOP)


def kill_an_agent(boxed: BoxedJob, chance: Chance) -> None:
    """Whatever started it, as a cluster's own manager does, starts it again."""
    host = _not_the_first(boxed, chance)
    send(boxed.agents[host], signal.SIGKILL)
    boxed.until(lambda: not host.processes(), "ranks have ended behind their agent", PATIENCE + 15)
    boxed.start(host)


def replace_a_host(boxed: BoxedJob, chance: Chance) -> None:
    host = _not_the_first(boxed, chance)
    host.kill()
    del boxed.agents[host]
    boxed.start(boxed.box.add())


def cut_a_link(boxed: BoxedJob, chance: Chance) -> None:
    host = chance.choice(list(boxed.agents))
    host.link(up=False)
    time.sleep(chance.uniform(1, 4))
    host.link(up=True)


GOES_ON: list[Fault] = [kill_a_rank, stop_a_rank, kill_an_agent, replace_a_host, cut_a_link]


def kill_the_first_host(boxed: BoxedJob, _: Chance) -> Host:
    """Where agents meet: those of other hosts cannot meet again."""
    boxed.box.hosts[0].kill()
    return boxed.box.hosts[0]


def kill_the_first_agent(boxed: BoxedJob, _: Chance) -> None:
    send(boxed.agents[boxed.box.hosts[0]], signal.SIGKILL)


def lose_a_host(boxed: BoxedJob, chance: Chance) -> Host:
    """And none comes in its place."""
    host = _not_the_first(boxed, chance)
    host.kill()
    return host


def fill_a_disk(boxed: BoxedJob, chance: Chance) -> None:
    host = chance.choice(list(boxed.agents))
    host.fill_disk(boxed.job.checkpoints, boxed.agents[host])


ENDS: list[Fault] = [kill_the_first_host, kill_the_first_agent, lose_a_host, fill_a_disk]


def _not_the_first(boxed: BoxedJob, chance: Chance) -> Host:
    return chance.choice([host for host in boxed.agents if host is not boxed.box.hosts[0]])


class Undisturbed:
    """The losses of each grid, trained once in the ranks that tests share."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._known: dict[str, list[float]] = {}

    def losses(self, grid: str) -> list[float]:
        if grid not in self._known:
            made = _job(self._folder / grid, grid)
            self._ranks.run(made.grid.world, train, made)
            self._known[grid] = [record.loss for record in read_log(made.folder / "metrics.jsonl").records]
        return self._known[grid]


@pytest.fixture(scope="module")
def undisturbed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    yield Undisturbed(ranks, tmp_path_factory.mktemp("undisturbed"))


def _disturb(
    folder: Path, undisturbed: Undisturbed, grid: str, each: int, faults: list[Fault], end: Fault | None, seed: int
) -> list[str]:
    """Train once, with these faults one after the other; what happened, in words. `end`: one after which nothing can go on."""
    chance, told = Chance(seed), []
    job = _job(folder / f"run-{seed}", grid)
    losses = undisturbed.losses(grid)
    with Box(job.grid.world // each) as box:
        boxed = BoxedJob(box, job, each)
        try:
            for host in box.hosts:
                boxed.start(host)
            stretch = STEPS // (len(faults) + bool(end) + 1)
            for place, fault in enumerate([*faults, *([end] if end else [])]):
                at = place * stretch + chance.randint(1, stretch)
                boxed.until(lambda at=at: boxed.steps() >= at, f"step {at} was done", RESUMES)  # type: ignore[misc]
                told_before = {host: boxed.log_of(host).stat().st_size for host in boxed.agents}
                killed = fault(boxed, chance)
                told.append(f"{grid}, {fault.__name__} at step {at}")
                if fault is end:
                    took = boxed.until(boxed.ended, "all hosts have ended", _limit(fault))
                    told[-1] += f": all ended after {took:.0f} s"
                    _assert_told(boxed, fault, killed, told_before)
                elif fault is not cut_a_link:
                    before = len(boxed.log().events)
                    took = boxed.until(lambda before=before: _resumed(boxed, before), "it went on", RESUMES)  # type: ignore[misc]
                    told[-1] += f": went on after {took:.0f} s"
            if end is None:
                boxed.until(boxed.ended, "training has ended", RESUMES)
                assert [record.loss for record in boxed.log().records] == losses
                assert [record.step for record in boxed.log().records] == list(range(STEPS))
            else:
                found = boxed.log().records
                assert [record.loss for record in found] == losses[: len(found)]
            _assert_nothing_left(boxed, ended_well=end is None)
        except BaseException as error:
            error.add_note(f"seed {seed}: {told}\n{boxed.words()}")
            raise
    assert box.left() == []
    return told


def _resumed(boxed: BoxedJob, before: int) -> bool:
    return any(event.name == "resume" for event in boxed.log().events[before:]) or boxed.ended()


def _limit(fault: Fault) -> float:
    """Ranks wait for each other, then agents for one that is to come; a full disk is found at each attempt's first save."""
    return RESUMES + (JOIN if fault is lose_a_host else 180 if fault is fill_a_disk else 0)


def _assert_told(boxed: BoxedJob, fault: Fault, killed: Host | None, before: dict[Host, int]) -> None:
    """Since then every host that was not killed has named a rank, its host and the reason."""
    for host in boxed.agents:
        words = boxed.log_of(host).read_bytes()[before[host] :].decode(errors="replace")
        assert host is killed or NAMES_ALL.search(words), f"{host.name}: {words}"
    if fault is fill_a_disk:
        assert re.search(
            "could not be written: the disk is full|cannot be seen here|tells of checkpoints", boxed.words()
        )


def _assert_nothing_left(boxed: BoxedJob, ended_well: bool) -> None:
    for host in boxed.box.hosts:
        assert not host.processes()
    if ended_well:  # else the next attempt, which does not come, would sweep what a killed save left
        left = [*boxed.job.folder.rglob(".step-*"), *boxed.job.folder.rglob("*.partial")]
        assert not left


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_faults(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """One attempt after the other on two hosts: a rank stopped, and a host killed and replaced, with its rank."""
    _disturb(tmp_path, undisturbed, "data=2", 1, [stop_a_rank, replace_a_host], None, time.time_ns())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thirty_faults(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """All kinds, on all grids; every second run ends with one after which nothing can go on."""
    seed = time.time_ns()
    chance, count, run = Chance(seed), 0, 0
    faults = [*GOES_ON] * 5
    chance.shuffle(faults)
    while count < 30:
        grid, each = GRIDS[run % len(GRIDS)]
        some, faults = faults[:3], faults[3:]
        end = ENDS[run // 2 % len(ENDS)] if run % 2 or not some else None
        for words in _disturb(tmp_path, undisturbed, grid, each, some, end, seed + run):
            count += 1
            with (tmp_path / "faults.txt").open("a", encoding="utf-8") as told:
                told.write(f"{words}\n")
        run += 1
