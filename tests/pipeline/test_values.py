"""A schedule prints, and reads back as an equal value, in every form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from cubeloom import UserError
from cubeloom.pipeline import Action, Kind, Schedule, from_csv, from_json, generate, to_csv, to_json
from cubeloom.pipeline.schedule import Updates
from pipeline.legal import schedules


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.FORWARD, 0)),
        ("12W31@3", Action(12, Kind.WEIGHT_GRAD, 31, 3)),
        ("0B7.1@1", Action(0, Kind.BACKWARD, 7, 1, 1)),
        ("4R9", Action(4, Kind.REDUCE, 9)),
    ],
)
def test_an_action_s_text_is_its_value(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0.2", "2F0@", "2F-1"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not an action"):
        Action.parse(text)


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_text_csv_and_json_give_the_same_schedule_back(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule
    assert from_csv(to_csv(schedule)) == schedule
    assert from_json(to_json(schedule)) == schedule


def test_the_rows_of_chimera_come_first_in_its_text() -> None:
    assert str(generate("chimera", 4, 4)).splitlines()[0] == "0F0 0F1 3F2@1 3B2@1 3F3@1 3B3@1 0B0 0B1"


def test_the_json_has_what_was_agreed_on() -> None:
    data = json.loads(to_json(generate("chimera", 4, 4)))
    assert list(data) == [
        *("name", "stages", "microbatches", "workers", "makespan", "ideal"),
        *("bubble_ratio", "peak_activations", "weight_copies"),
    ]
    assert data["workers"][0][:3] == ["0F0", "0F1", "3F2@1"]
    assert (data["makespan"], data["ideal"], data["weight_copies"]) == (16, 12, 2)
    assert data["bubble_ratio"] == [0.25] * 4
    assert data["peak_activations"] == [3, 4, 4, 3]


def test_what_a_runtime_asks_follows_from_the_rows() -> None:
    schedule = generate("chimera", 4, 6)
    assert schedule.placement == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert schedule.assignment == (0, 0, 0, 1, 1, 1)
    assert schedule.held_by(1) == [(0, 1), (1, 2)]
    assert schedule.updates is Updates.FLUSH
    assert not schedule.halved
    assert generate("chimera", 4, 6, mode="halving").halved


def test_torch_s_csv_is_read_with_its_bubbles() -> None:
    schedule = from_csv("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    assert (schedule.stages, schedule.microbatches) == (2, 2)
    assert " ".join(map(str, schedule.workers[1])) == "1F0 1B0 1F1 1B1"


@pytest.mark.parametrize("text", ["", "# only a name"])
def test_a_csv_without_actions_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="one row for each worker"):
        from_csv(text)


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "x", "stages": 1, "microbatches": 1}'])
def test_a_json_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(UserError, match='"workers"'):
        from_json(text)
