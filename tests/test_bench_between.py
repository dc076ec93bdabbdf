"""`bench/between.py` trains, and says what it saw. No time is asserted."""

from __future__ import annotations

import re

import pytest
from bench.between import Between


@pytest.mark.long
@pytest.mark.timeout(120)
def test_steps_and_what_lies_between_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert Between(steps=3)() == 0
    told = re.search(r"tiny on data=2: a step ([\d.]+) ms, from step to step ([\d.]+) ms", capsys.readouterr().out)
    assert told is not None and min(map(float, told.groups())) > 0
