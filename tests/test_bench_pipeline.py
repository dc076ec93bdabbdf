"""`bench/pipeline.py` runs: every schedule that it times can be made, and both runtimes do a step. No time is asserted."""

from __future__ import annotations

import pytest
from bench.pipeline import FORWARD, Timing, measure, overhead_line, overheads, schedules, timings_table

from cubeloom.launch import RankPool
from cubeloom.pipeline import Costs, generate, simulate
from cubeloom.pipeline.schedules import FAMILIES

pytestmark = pytest.mark.timeout(60)


def test_every_family_is_timed() -> None:
    for workers in (4, 8):
        assert {schedule.name for schedule in schedules(workers)} == set(FAMILIES)


@pytest.mark.long
def test_a_step_of_waits_lasts_at_least_as_long_as_simulated(ranks: RankPool) -> None:
    schedule = generate("chimera", 4, 4)
    costs = Costs.like(schedule, FORWARD, FORWARD, FORWARD)
    measured = max(ranks.run(4, measure, schedule, costs, 1))
    simulated = simulate(schedule, costs).makespan
    assert measured >= simulated
    assert timings_table([Timing(schedule, simulated, measured)]).row_count == 1


@pytest.mark.long
def test_both_runtimes_do_the_same_steps(ranks: RankPool) -> None:
    line = overhead_line(2, 4, ranks.run(2, overheads, 2, 4, 1))
    assert line.startswith("1F1B, 2 ranks, 4 micro-batches") and "ratio" in line
