"""`cubeloom doctor`: what it measures of this machine, what it prints, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubeloom import UserError
from cubeloom.cli.doctor import Doctor
from cubeloom.comm import devices
from cubeloom.launch import RankFailed, RankPool
from cubeloom.tools.doctor import Facts, gather, links

from .made_up import FACTS, MACHINE


@pytest.mark.slow
def test_ranks_measure_each_other(ranks: RankPool) -> None:
    pairs, reduced = ranks.run(3, links.measure, devices.CPU, 3)[0]
    assert len(pairs) == 2
    assert reduced > 0
    for pair in pairs:
        assert pair.latency > 0
        assert pair.bandwidth > 0
        assert abs(pair.skew) <= pair.skew_error + 1e-3  # one machine has one clock


def test_facts_of_this_machine(tmp_path: Path) -> None:
    facts = gather(2, tmp_path)
    assert facts.machine.cores >= 1
    assert 0 < facts.machine.memory_free <= facts.machine.memory
    assert facts.machine.disk.path == str(tmp_path)
    assert "lo" in facts.machine.interfaces
    assert facts.versions["torch"] is not None
    assert facts.links[0].backend == devices.BACKENDS[devices.CPU]
    assert facts.links[0].failure is None
    assert facts.links[0].ranks == 2


def test_ranks_that_cannot_talk_are_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankFailed("no answer from rank 1\nand more")

    monkeypatch.setattr(RankPool, "run", fail)
    found = links.measure_links(devices.CPU, 2)
    assert found.failure == "RankFailed: no answer from rank 1"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(facts: Facts) -> None:
        monkeypatch.setattr("cubeloom.tools.doctor.gather", lambda ranks, folder: facts)

    return use


def test_a_sound_machine_exits_0(pretend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(FACTS)
    assert Doctor()() == 0
    said = capsys.readouterr().out
    assert "0 wrong, 0 doubtful" in said
    assert "hidden" not in said


def test_doubt_exits_0_and_a_fault_exits_1(pretend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(replace(FACTS, machine=replace(MACHINE, cores=1)))
    assert Doctor()() == 0
    assert "0 wrong, 1 doubtful" in capsys.readouterr().out
    pretend(replace(FACTS, machine=replace(MACHINE, open_files=10)))
    assert Doctor()() == 1
    assert "1 wrong, 0 doubtful" in capsys.readouterr().out


def test_json_is_the_last_line_and_keeps_secrets(pretend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(replace(FACTS, machine=replace(MACHINE, open_files=10)))
    assert Doctor(json=True)() == 1
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["ok"] is False
    assert result["findings"][0]["severity"] == "wrong"
    assert result["machine"]["open_files"] == 10
    assert result["variables"] == {"OMP_NUM_THREADS": "1"}
    assert "hidden" not in said.out + said.err


@pytest.mark.parametrize("ranks", [0, 1, 65])
def test_who_would_talk_to_whom(ranks: int) -> None:
    with pytest.raises(UserError, match=f"--ranks {ranks}"):
        Doctor(ranks=ranks)()
