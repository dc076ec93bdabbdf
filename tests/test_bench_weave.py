"""`bench/weave.py` measures every setting it names. No time is asserted."""

from __future__ import annotations

import pytest
from bench.weave import SETTINGS, Measured, measure, table

from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig
from cubeloom.parallel import Batch

pytestmark = pytest.mark.timeout(60)


@pytest.mark.long
def test_every_setting_is_measured_on_both_ranks(ranks: RankPool) -> None:
    size = GPTConfig(vocab=32, positions=8, hidden=16, layers=1, heads=2)
    for each in ranks.run(2, measure, "sharded", size, Batch(8, 8), SETTINGS, 1):
        assert len(each) == len(SETTINGS) and all(run.step > 0 for run in each)
    shown = table("sharded", {setting: Measured(1.0, 0.5, 0.5) for setting in SETTINGS})
    assert shown.row_count == len(SETTINGS)
