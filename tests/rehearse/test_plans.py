"""Plans that are rehearsed: those that cannot run are refused, and the next move up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubeloom.base.errors import UserError
from cubeloom.cli.plan import Plan as Command
from cubeloom.plan.search import Answer, Plan, search
from cubeloom.tools.rehearse import Rehearsal, Rehearsed, plans, rehearse, rehearsed
from cubeloom.tools.rehearse.plans import TOO_LARGE, UNMATCHED
from cubeloom.tools.verify import Experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def answer() -> Answer:
    """A plan with a pipeline, one with an axis of the cube, and that with recomputation, which here is not needed."""
    found = search("gpt-tiny", "dgx-h100", 8, 8)

    def first(wanted: Any) -> Plan:
        return next(plan for plan in found.plans if wanted(plan))

    piped = first(lambda plan: plan.grid.pipe > 1 and plan.shape.replicas > 1)
    cubed = first(lambda plan: plan.grid.pipe == 1 and plan.grid.y > 1)
    return replace(found, plans=(piped, cubed, replace(cubed, recompute=True)))


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def found(answer: Answer, told: list[str]) -> Rehearsed:
    return rehearsed(answer, 3, tell=told.append)


def test_bytes_are_those_predicted_and_memory_is_near(answer: Answer, found: Rehearsed, told: list[str]) -> None:
    assert [tried.plan for tried in found.passed] == list(answer.plans) and not found.failed
    for tried in found.passed:
        assert tried.bytes_agree and tried.rehearsal.matched, tried.bytes
        if not tried.plan.recompute:
            assert 0.5 * tried.plan.total_memory < tried.peak < 1.3 * tried.plan.total_memory
        assert all(counted == predicted for counted, predicted in tried.bytes.values())
    assert len(told) == sum(len(tried.rehearsal.runs) for tried in found.passed)
    assert told[0].startswith(f"plan 1 of 3, {answer.plans[0].grid}") and "rank 1 of" in told[0]


def test_what_needs_more_than_the_device_has_is_refused(answer: Answer, found: Rehearsed) -> None:
    """The device has a byte less than the first plan's peak, and the second needs less."""
    large, small = sorted(found.passed[:2], key=lambda tried: -tried.peak)
    assert large.peak > small.peak
    device = replace(answer.cluster.device, memory=(large.peak - 1) / (1 - answer.task.reserve))
    tight = replace(answer, cluster=replace(answer.cluster, device=device), plans=(large.plan, small.plan))
    found = rehearsed(tight, 1)
    assert [tried.plan for tried in found.failed] == [large.plan]
    assert [tried.plan for tried in found.passed] == [small.plan] == list(found.answer.plans)
    assert found.answer.refused[TOO_LARGE] == 1
    entry = found.as_json(10)
    assert entry["plans"][0]["rehearsed"]["refused"] is None
    assert entry["failed"][0]["rehearsed"]["refused"] == TOO_LARGE


def test_ranks_that_do_not_fit_together_are_refused(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Experiment] = []

    def broken(experiment: Experiment, **rest: Any) -> Rehearsal:
        seen.append(experiment)
        found = rehearse(experiment, **rest)
        return found if len(seen) > 1 else replace(found, problems=("deadlock: rank 0 waits",))

    monkeypatch.setattr(plans, "rehearse", broken)
    found = rehearsed(replace(answer, plans=answer.plans[1:]), 1)
    assert found.answer.refused[UNMATCHED] == 1 and found.answer.plans == answer.plans[2:]
    assert found.as_json(1)["failed"][0]["rehearsed"]["problems"] == ["deadlock: rank 0 waits"]


def test_it_ends_where_none_can_run(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "TRIES", 2)
    device = replace(answer.cluster.device, memory=1.0)
    one = replace(answer, cluster=replace(answer.cluster, device=device), plans=answer.plans[1:2] * 4)
    found = rehearsed(one, 1)
    assert len(found.failed) == 2 and len(found.answer.plans) == 2 and not found.passed


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(model="gpt-tiny", cluster="dgx-h100", devices=8, global_batch=8, rehearse=2, json=True, top=3)
    assert command() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ["rehearsed" in plan for plan in found["plans"]] == [True, True, False] and found["failed"] == []
    for plan in found["plans"][:2]:
        ran = plan["rehearsed"]
        assert ran["bytes_agree"] and ran["matched"] and ran["problems"] == []
        assert {axis: size["predicted"] for axis, size in ran["bytes"].items()} == plan["bytes"]
        assert 0 < ran["memory"]["peak"] < ran["memory"]["room"]
    assert replace(command, json=False, rehearse=1)() == 0
    out = capsys.readouterr().out
    assert out.count("rehearsed ") == 1 and "peak of tensors" in out and "bytes are as predicted" in out
    with pytest.raises(UserError, match="from 0 up"):
        replace(command, rehearse=-1)()


def test_a_settings_file_s_own_model_is_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base.toml"
    base.write_text('[model]\npreset = "gpt-tiny"\nlayers = 3\n[batch]\nsamples = 8\nsequence = 32\n')
    command = Command(file=base, cluster="dgx-h100", devices=4, rehearse=1, json=True, overrides=("--model.layers=2",))
    assert command() == 0
    ran = json.loads(capsys.readouterr().out.splitlines()[-1])["plans"][0]["rehearsed"]
    assert ran["bytes_agree"] and ran["matched"]
