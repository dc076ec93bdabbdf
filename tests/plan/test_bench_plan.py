"""The bench of plans runs and has its figures; how large they are is not for a test."""

from __future__ import annotations

from bench.plan import closed_form, each_on_its_own, step_of, whole_search


def test_rates_and_seconds() -> None:
    rate = closed_form("gpt-tiny", 8, 16)
    assert rate.figure > 0 and "decompositions" in rate.what
    assert each_on_its_own("gpt-tiny", 100).figure > 0
    assert whole_search("gpt-tiny", 8, 16).figure > 0
    assert "128 ranks" in step_of(128).what
