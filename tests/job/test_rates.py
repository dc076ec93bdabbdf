"""Learning rates, step by step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom import UserError
from cubeloom.train.job.rates import Rate


def shown(rate: Rate) -> list[float]:
    return [round(rate(step), 4) for step in range(rate.steps + 1)]


def test_each_shape() -> None:
    assert shown(Rate(peak=1, steps=6, warmup=2, decay="constant")) == [0.5, 1, 1, 1, 1, 1, 1]
    assert shown(Rate(peak=1, steps=6, warmup=2, decay="linear")) == [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert shown(Rate(peak=1, steps=6, warmup=2, decay="cosine")) == [0.5, 1, 0.9045, 0.6545, 0.3455, 0.0955, 0.0955]
    assert shown(Rate(peak=1, steps=6, warmup=2, decay="wsd", cooldown=0.5)) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0.25]
    assert shown(Rate(peak=2, steps=2, decay="linear", floor=1)) == [1.5, 1, 1]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(1, 50),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_up_then_never_up_again(decay: str, steps: int, warm: float, floor: float, cooldown: float) -> None:
    rate = Rate(peak=1, steps=steps, warmup=int(warm * steps), decay=decay, floor=floor, cooldown=cooldown)  # type: ignore[arg-type]
    rates = [rate(step) for step in range(steps + 3)]
    turn = rate.warmup - 1 if rate.warmup else 0
    assert all(a <= b for a, b in pairwise(rates[: turn + 1]))
    assert all(a >= b for a, b in pairwise(rates[turn:]))
    assert all(0 <= each <= 1 for each in rates)
    assert all(each > 0 for each in rates)  # also the last: it would train nothing
    if floor:
        assert rates[-1] == (1 if decay == "constant" or steps == rate.warmup else pytest.approx(floor))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peak": 1, "steps": 5, "warmup": 6}, "rate.warmup = 6: it does not fit into 5 steps"),
        ({"peak": 1, "steps": 5, "floor": 2}, "cannot fall from rate.peak = 1 to rate.floor = 2"),
        ({"peak": 1, "steps": 5, "cooldown": 0}, "cooldown is a share of the steps"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Rate(**settings)  # type: ignore[arg-type]
