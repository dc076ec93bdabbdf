"""The program of a rank is the journal of a real one, event by event: what is started and awaited, in which order.

The program follows from model, grid, schedule and settings: a rehearsal runs it without a network and values. The
journal is what a gloo rank did. What layers communicate follows from layouts alone, as the planner reads them.
"""

from __future__ import annotations

import pytest

from cubeloom.comm.ledger import Entry
from cubeloom.launch import RankPool
from cubeloom.tools.rehearse import measure, rehearse
from cubeloom.tools.rehearse.program import Event
from cubeloom.tools.rehearse.roles import Roles
from grids import rest_is_long

from .drawn import drawn
from .layout_events import counted, from_layouts

LONG, SHORT = 220, 4

pytestmark = pytest.mark.timeout(180)


@pytest.mark.slow
@pytest.mark.parametrize("number", rest_is_long(range(LONG), range(SHORT)))
def test_program_is_the_journal(ranks: RankPool, number: int) -> None:
    words, experiment = drawn(number)
    rehearsal = rehearse(experiment)
    assert rehearsal.problems == ()
    roles = Roles(experiment)
    programs = {roles.of(run.rank): run for run in rehearsal.runs}
    for rank, seen in enumerate(ranks.run(experiment.grid.world, measure, experiment)):
        assert_equal(programs[roles.of(rank)].events, seen.events, f"{words}, rank {rank}")
    for run in rehearsal.runs:  # in any order, the events of layers follow from their layouts
        assert counted(run.ledger) == from_layouts(experiment, run.rank), f"{words}, rank {run.rank}"


def assert_equal(program: tuple[Event, ...], journal: tuple[Event, ...], where: str) -> None:
    """The first difference, and not two lists of hundreds."""
    assert program, f"{where}: no event"
    for place, (expected, found) in enumerate(zip(program, journal, strict=False)):
        assert found == expected, f"{where}, event {place}"
    assert len(journal) == len(program), where


def test_another_order_is_found() -> None:
    first, second = (Event("start", number, Entry("all_gather", "z", 2, 64, f"{number}")) for number in range(2))
    with pytest.raises(AssertionError, match="rank 0, event 0"):
        assert_equal((first, second), (second, first), "rank 0")
    with pytest.raises(AssertionError, match="rank 0"):
        assert_equal((first, second), (first,), "rank 0")
