"""What a rehearsal says is what ranks of a live job do: bytes to the last one, memory to the last tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cubeloom.base.grid import AXES, grids
from cubeloom.launch import RankPool
from cubeloom.tools.rehearse import Memory, RankRun, measure, rehearse
from cubeloom.tools.rehearse.roles import Roles
from cubeloom.tools.verify import Experiment

from .jobs import GPT, JOBS, KEPT, REGATHERED, closed_form, job

pytestmark = pytest.mark.timeout(180)


def agrees(ranks: RankPool, experiment: Experiment) -> None:
    rehearsal = rehearse(experiment)
    assert rehearsal.problems == ()
    real = ranks.run(experiment.grid.world, measure, experiment)
    roles = Roles(experiment)
    stands = {roles.of(run.rank): run for run in rehearsal.runs}
    for rank, seen in enumerate(real):  # all of them, not only those that were rehearsed
        run = stands[roles.of(rank)]
        assert run.ledger.entries == seen.ledger.entries
        assert run.bytes == closed_form(experiment, rank)
    # A thread of gloo's may hold a buffer a moment longer than we do, where it must wait for its turn: never shorter.
    for _ in range(3):
        if all(_as_measured(run, real[run.rank].memory) for run in rehearsal.runs):
            return
        real = ranks.run(experiment.grid.world, measure, experiment)
    raise AssertionError([(run.rank, run.memory.peak, real[run.rank].memory.peak) for run in rehearsal.runs])


def _as_measured(run: RankRun, real: Memory) -> bool:
    """The peak within 1 %, and each part of it within 1 % of the peak."""
    assert sum(real.at_peak.values()) == real.peak
    near = 0.01 * real.peak
    parts = (abs(run.memory.at_peak[kind] - size) for kind, size in real.at_peak.items())
    return abs(run.memory.peak - real.peak) <= near and all(part <= near for part in parts)


SHORT = {"cube", "rounded", "hosted", "chimera-woven-zero", "padded"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in JOBS])
def test_bytes_and_memory(ranks: RankPool, name: str) -> None:
    agrees(ranks, JOBS[name])


def test_blocks_that_are_recomputed(ranks: RankPool) -> None:
    agrees(ranks, job("pipe=2,z=2", "1f1b", recompute=True))


RESTS = {"kept": KEPT, "regathered": REGATHERED}
WIDE = replace(GPT, heads=16, layers=6)
EIGHT = [
    (grid, name)
    for grid in map(str, grids(8, AXES))
    for name in (("1f1b", "chimera", "interleaved") if "pipe" in grid else (None,))
    if "pipe=8" not in grid or name != "interleaved"  # that would be 16 stages of 8 pieces
]


@pytest.mark.long
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("grid", "schedule"), EIGHT)
def test_every_decomposition_of_eight(ranks: RankPool, grid: str, schedule: str | None, zero: bool) -> None:
    agrees(ranks, job(grid, schedule, model=WIDE, zero=zero))


@pytest.mark.long
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("grid", [grid for grid, schedule in EIGHT if schedule is None])
def test_every_cube_of_eight_at_rest_and_woven(ranks: RankPool, grid: str, rest: str, ways: int) -> None:
    agrees(ranks, job(grid, model=replace(WIDE, layers=1), rest=RESTS[rest], ways=ways))
