"""The bench of the planner against trained plans, as small as can be; it asserts nothing of times."""

from __future__ import annotations

import json

import pytest
from bench.planned import Planned
from rich.console import Console

pytestmark = pytest.mark.timeout(180)


@pytest.mark.long
def test_plans_are_trained_beside_torch_s_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    Planned(cpu=True, quick=True, steps=2)(Console(width=150))
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert found["measured"] == 4 and 1 <= found["place_of_fastest"] <= 4
    assert found["regret"] >= 0
    for peer in ("torch FSDP2", "torch 1F1B", "torch ZB1P", "torch tensor parallel"):
        assert peer in out
