"""A rank killed at any moment: the agent begins again from the last checkpoint, and the curve is the undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import job

from cubeloom.base.settings import write
from cubeloom.train.job import Job
from cubeloom.train.job.settings import CheckpointSettings
from cubeloom.train.metrics.log import Log, read_log
from scripts import Started, start_cubeloom

EVERY = 4
KILLS_SHORT, KILLS_LONG = 1, 20


def _job(folder: Path, steps: int, restarts: int) -> Job:
    made = job(folder, "pipe=2,x=2", "chimera", steps=steps)
    return replace(made, restarts=restarts, checkpoint=CheckpointSettings(every=EVERY))


def _settings(what: Job) -> str:
    file = what.folder.parent / f"{what.folder.name}.toml"
    file.write_text(write(what))
    return str(file)


def _ranks(agent: int) -> list[int]:
    """The processes of ranks: those that the agent's fork server forked."""
    servers = [child for child in _children(agent) if "forkserver" in _command(child)]
    return [rank for server in servers for rank in _children(server)]


def _children(process: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(fields[1]) == process and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _kill_one(agent: Started, chance: random.Random, after: float) -> bool:
    """Wait so long, then kill a rank; whether there was one."""
    time.sleep(after)
    while agent.poll() is None:
        ranks = _ranks(agent.pid)
        if ranks:
            os.kill(chance.choice(ranks), signal.SIGKILL)
            return True
        time.sleep(0.01)
    return False


def _end_of(agent: Started) -> None:
    """Wait until it has ended well; of one that stands still, tell where all its processes are."""
    if agent.wait(200) is None:
        for process in (agent.pid, *_ranks(agent.pid)):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(process, signal.SIGUSR2)
        time.sleep(2)  # for them to answer
    done = agent.done(2)
    assert done.returncode == 0, done.stderr


def _undisturbed(folder: Path, steps: int) -> tuple[Log, float]:
    what = _job(folder / "undisturbed", steps, restarts=0)
    began = time.monotonic()
    _end_of(start_cubeloom("train", _settings(what)))
    return read_log(what.folder / "metrics.jsonl"), time.monotonic() - began


def _assert_resumed(log: Log, undisturbed: Log, kills: int) -> None:
    assert [record.step for record in log.records] == [record.step for record in undisturbed.records]
    assert [record.loss for record in log.records] == [record.loss for record in undisturbed.records]
    begun = 0
    for event in log.events:
        step = event.step or 0
        if event.name == "checkpoint":
            begun = step
        if event.name == "resume":
            # What was being written may be lost, and nothing before it.
            assert step >= begun - EVERY
    restarts = [event.fields["restart"] for event in log.events if event.name in ("start", "resume")]
    assert len(restarts) <= kills + 1 and max(restarts) <= kills


def _disturb(folder: Path, undisturbed: Log, lasts: float, seed: int, kills: int) -> int:
    """Train once, killing a rank so many times; how many were killed before the end."""
    chance = random.Random(seed)
    what = _job(folder / f"killed-{seed}", len(undisturbed.records), restarts=kills)
    agent = start_cubeloom("train", _settings(what))
    done = sum(_kill_one(agent, chance, chance.uniform(0.1, lasts)) for _ in range(kills))
    _end_of(agent)
    _assert_resumed(read_log(what.folder / "metrics.jsonl"), undisturbed, kills)
    return done


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_do_not_outlive_their_agent(tmp_path: Path) -> None:
    """One that is killed cannot end them: they see it, keep their step, and end. When asked they say where they are."""
    words = [sys.executable, "-m", "cubeloom", "train", _settings(_job(tmp_path / "run", 100_000, restarts=0))]
    agent = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "metrics.jsonl"
    while not log.exists():
        time.sleep(0.1)
    ranks = _ranks(agent.pid)
    assert len(ranks) == 4
    os.kill(ranks[0], signal.SIGUSR2)
    agent.kill()
    _, errors = agent.communicate(timeout=60)  # its pipe is theirs too: until the last of them has ended
    assert "in _rank_of_agent" in errors  # where the rank was that was asked
    assert not any(_command(rank) for rank in ranks)
    assert read_log(log).events[-1].name == "asked to stop"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kill(tmp_path: Path) -> None:
    undisturbed, lasts = _undisturbed(tmp_path, 24)
    assert _disturb(tmp_path, undisturbed, lasts / 2, seed=time.time_ns(), kills=KILLS_SHORT) >= 1


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_kills(tmp_path: Path) -> None:
    undisturbed, lasts = _undisturbed(tmp_path, 40)
    killed, seed = 0, time.time_ns()
    while killed < KILLS_LONG:
        killed += _disturb(tmp_path, undisturbed, lasts / 2, seed + killed, kills=2)
