"""`bench/emulated.py` runs: the planner and emulated ranks each say how long a step takes. No time is asserted."""

from __future__ import annotations

import pytest
from bench.emulated import CLUSTER, DECOMPOSITIONS, Decomposition, Row, compare, experiment, predicted, regret, table
from bench.emulated_program import programs

from cubeloom.launch import RankPool
from cubeloom.tools.emulate import EmulatedStep
from cubeloom.tools.emulate.events import Await, Compute, Start, joined
from cubeloom.tools.rehearse import rehearse

pytestmark = pytest.mark.timeout(120)

PIPED = Decomposition(pipe=2, x=2, schedule="chimera direct", microbatches=2)
CUBED = Decomposition(z=2, x=2, ways=2)


def test_there_are_enough_and_all_kinds() -> None:
    assert len(set(DECOMPOSITIONS)) == len(DECOMPOSITIONS) >= 30
    assert max(d.ranks for d in DECOMPOSITIONS) <= 8
    assert {d.ways for d in DECOMPOSITIONS} == {1, 2}
    titles = {d.schedule for d in DECOMPOSITIONS}
    assert titles >= {"1f1b", "gpipe", "zb-h1", "chimera direct", "chimera-zb"}


@pytest.mark.long
@pytest.mark.parametrize("decomposition", [PIPED, CUBED], ids=str)
def test_both_times_are_there(ranks: RankPool, decomposition: Decomposition) -> None:
    row = compare(ranks, decomposition, 1)
    assert row.predicted > 0 and row.measured > 0
    assert table([row]).row_count == 1
    # No process is ahead of its device.
    assert all(step.late >= 0 for step in row.steps)


@pytest.mark.long
def test_a_program_has_all_that_the_rank_communicates() -> None:
    """Every collective of the rehearsed ledger is in the emulated rank's step, and every one is awaited."""
    job = experiment(PIPED, predicted(PIPED).grid)
    found = programs(job, CLUSTER, "fp32")
    for run, program in zip(rehearse(job).runs, found, strict=True):
        every = [*program.before, *(e for events in program.actions.values() for e in events), *program.after]
        started = [event.number for event in every if isinstance(event, Start)]
        collectives = [entry for entry in run.ledger.entries if entry.operation not in ("send", "receive")]
        assert len(started) == len(collectives)
        assert sorted(started) == sorted(event.number for event in every if isinstance(event, Await))


def test_regret_is_of_the_one_that_was_predicted_fastest() -> None:
    rows = [
        Row(PIPED, 1.0, (EmulatedStep(1.1, 0.0),)),
        Row(CUBED, 2.0, (EmulatedStep(1.0, 0.0), EmulatedStep(9.0, 5.0))),
    ]
    assert regret(rows) == pytest.approx(0.1)
    assert rows[1].measured == 1.0 and rows[1].late == 1


def test_stretches_of_computation_are_joined() -> None:
    assert joined([Compute(1.0), Compute(2.0), Await(3), Compute(4.0)]) == (Compute(3.0), Await(3), Compute(4.0))
