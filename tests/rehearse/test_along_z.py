"""Sharded weights and nothing to communicate in the plane: a weight is gathered once for all strands, and let go."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cubeloom.parallel import ShardingPolicy
from cubeloom.tools.rehearse import rehearse

from .jobs import GPT, closed_form, job

pytestmark = pytest.mark.timeout(120)

ONE = replace(GPT, layers=1)
GRIDS = [
    *((f"{more}z={z}", None) for z in (2, 4, 8) for more in ("", "data=2,")),
    *(("pipe=2,z=4", schedule) for schedule in ("1f1b", "interleaved", "zb-h1", "chimera")),
    ("pipe=2,data=2,z=2", "chimera-zb"),
]
RESTS = [
    ShardingPolicy(weights="freed"),
    ShardingPolicy(weights="kept"),
    ShardingPolicy(weights="kept", inputs="regathered"),
]
SHORT = {("z=2", 2), ("data=2,z=4", 2), ("z=8", 4), ("pipe=2,z=4", 2)}


def cases() -> list[object]:
    found: list[object] = []
    for (grid, schedule), tied, rest, ways in product(GRIDS, (True, False), RESTS, (1, 2, 4)):
        short = (grid, ways) in SHORT and tied and rest == RESTS[1] and schedule in (None, "1f1b", "chimera")
        label = f"{grid}-{schedule}-{'tied' if tied else 'own'}-{rest.weights}-{rest.inputs}-{ways}"
        found.append(pytest.param(grid, schedule, tied, rest, ways, id=label, marks=() if short else pytest.mark.long))
    return found


@pytest.mark.parametrize(("grid", "schedule", "tied", "rest", "ways"), cases())
def test_bytes_are_the_closed_form_s(
    grid: str, schedule: str | None, tied: bool, rest: ShardingPolicy, ways: int
) -> None:
    layers = 3 if schedule == "interleaved" else 1  # four stages need as many pieces
    experiment = job(grid, schedule, model=replace(ONE, tied=tied, layers=layers), rest=rest, ways=ways, steps=1)
    rehearsal = rehearse(experiment)
    assert rehearsal.problems == ()
    for run in rehearsal.runs:
        assert run.bytes == closed_form(experiment, run.rank)


@pytest.mark.slow
def test_strands_do_not_hold_all_gathered_weights() -> None:
    """Of four blocks more, freed weights add nothing to what comes and goes, but for one strand as for two."""

    def most(layers: int, ways: int) -> int:
        (run,) = rehearse(job("z=2", model=replace(GPT, layers=layers), ways=ways, steps=1)).runs
        return run.memory.at_peak["buffers"]

    for ways in (1, 2):
        assert most(4, ways) < 1.1 * most(2, ways)
