"""Rows from the papers' figures and from the code that ran their experiments."""

from __future__ import annotations

import pytest

from cubeloom.pipeline import Schedule, generate
from cubeloom.pipeline.action import Action, Kind


def rows(schedule: Schedule) -> list[str]:
    """As the figures write them: kind and micro-batch only."""
    return [" ".join(f"{action.kind}{action.microbatch}" for action in row) for row in schedule.workers]


def test_chimera_of_four_stages_is_figure_3() -> None:
    assert rows(generate("chimera", 4, 4)) == [
        "F0 F1 F2 B2 F3 B3 B0 B1",
        "F0 F2 F1 F3 B2 B0 B3 B1",
        "F2 F0 F3 F1 B0 B2 B1 B3",
        "F2 F3 F0 B0 F1 B1 B2 B3",
    ]


def test_chimera_of_four_pipelines_is_figure_8() -> None:
    assert rows(generate("chimera", 8, 8, pairs=2))[0] == "F0 F1 F6 F2 F7 F3 F4 B4 F5 B5 B2 B6 B3 B7 B0 B1"


def test_forward_doubling_is_what_the_sc21_code_ran() -> None:
    got = rows(generate("chimera", 4, 8, mode="doubling"))
    assert got[0] == "F0 F1 F2 F3 F4 F5 B4 F6 F7 B5 B0 B6 B1 B7 B2 B3"
    assert got[1] == "F0 F1 F4 F5 F2 F3 F6 F7 B4 B0 B5 B1 B6 B2 B7 B3"
    mirror = str.maketrans("01234567", "45670123")
    assert got[2:] == [got[1].translate(mirror), got[0].translate(mirror)]


def test_backward_halving_is_doubling_of_halves() -> None:
    doubled = generate("chimera", 4, 8, mode="doubling")
    halved = generate("chimera", 4, 4, mode="halving")
    as_halves = [
        [action._replace(microbatch=action.microbatch // 2, part=action.microbatch % 2) for action in row]
        for row in doubled.workers
    ]
    assert [list(row) for row in halved.workers] == as_halves


@pytest.mark.parametrize("stages", [2, 4, 6, 8, 16, 32])
@pytest.mark.parametrize("units", [1, 2, 3, 5])
def test_slots_give_the_phases_of_the_sc21_code(stages: int, units: int) -> None:
    """The generator sorts by slot; the code of the paper counts actions in five phases. The orders are the same."""
    schedule = generate("chimera", stages, stages * units)
    for worker, row in enumerate(schedule.workers):
        assert list(row) == phases(stages, worker, units)


def phases(stages: int, worker: int, units: int) -> list[Action]:
    half = stages // 2
    near = half - worker if worker < half else worker - half + 1
    far = half - near
    own = int(worker >= half)
    stage = {0: worker, 1: stages - 1 - worker}
    done = {(kind, replica): replica * half * units for kind in "FB" for replica in (0, 1)}

    def step(kind: str, which: int) -> Action:
        replica = own if which == 0 else 1 - own
        done[kind, replica] += 1
        return Action(stage[replica], Kind(kind), done[kind, replica] - 1, replica)

    row: list[Action] = []
    for unit in range(units):
        for _ in range(near):
            row += [step("B", 0), step("F", 0)] if unit else [step("F", 0)]
        row += [step("F", which) for _ in range(far) for which in (1, 0)]
        row += [step(kind, 1) for _ in range(near) for kind in "FB"]
        row += [step("B", which) for _ in range(far) for which in (0, 1)]
    return row + [step("B", 0) for _ in range(near)]


def test_dualpipe_starts_as_in_its_code() -> None:
    """D = 4, N = 8: worker 0 sends two micro-batches ahead, then serves both directions."""
    assert rows(generate("dualpipe", 4, 8))[0].startswith("F0 F1 F2 F4 I4 W4 F5 F3 B5 F6 B0 B6 F7 B1 B7")


def test_pipedream_2bw_updates_every_d_micro_batches() -> None:
    assert rows(generate("pipedream-2bw", 2, 4)) == ["F0 F1 B0 F2 B1 U1 F3 B2 B3 U3", "F0 B0 F1 B1 U1 F2 B2 F3 B3 U3"]
