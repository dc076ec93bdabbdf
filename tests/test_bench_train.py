"""`bench/train.py` measures what it says. No time is asserted."""

from __future__ import annotations

import json

import pytest
from bench.train import Bench


@pytest.mark.long
@pytest.mark.timeout(120)
def test_checkpoints_and_waiting_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert Bench(quick=True, json=True)() == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["seconds"] > 0 and told["waited_s"] >= 0
