"""Steps that cannot be right are found by the norm of their gradient."""

from __future__ import annotations

import math

import pytest

from cubeloom import UserError
from cubeloom.train.guard import WINDOW, Guard
from cubeloom.train.job.settings import GuardSettings


def test_a_norm_that_is_no_number_is_objected_to() -> None:
    guard = Guard(GuardSettings())
    assert guard.objection(1.0) is None
    assert guard.objection(math.nan) == "the gradient norm is nan"
    assert guard.objection(math.inf) == "the gradient norm is inf"


def test_a_spike_is_far_above_the_median_of_the_last_steps() -> None:
    guard = Guard(GuardSettings(spike=4))
    for _ in range(WINDOW - 1):
        assert guard.objection(1.0) is None
    assert guard.objection(9.0) is None  # too few to compare with
    assert guard.limit == 4.0
    assert guard.objection(3.9) is None
    assert guard.objection(4.1) == "the gradient norm 4.1 is over 4 times its median 1"
    assert list(guard.norms)[-2:] == [9.0, 3.9]  # a step that was skipped is no measure of others


def test_a_checkpoint_keeps_what_norms_are_compared_with() -> None:
    before = Guard(GuardSettings(spike=2))
    for _ in range(WINDOW):
        before.objection(1.0)
    after = Guard(GuardSettings(spike=2), list(before.norms))
    assert after.objection(3.0) is not None


def test_too_many_in_a_row_end_the_run() -> None:
    guard = Guard(GuardSettings(max_consecutive_skips=2))
    guard.objection(math.nan)
    guard.objection(1.0)  # not in a row
    guard.objection(math.nan)
    with pytest.raises(
        UserError, match="2 steps in a row had to be skipped, the last because the gradient norm is nan"
    ):
        guard.objection(math.nan)


@pytest.mark.parametrize(
    ("spike", "norms"), [(4.0, [0.1 + 0.7 * i for i in range(WINDOW)]), (4.0, [1.0]), (None, [1.0] * WINDOW)]
)
def test_the_limit_is_where_objections_begin(spike: float | None, norms: list[float]) -> None:
    """A device compares with it, and must find what is said later."""

    def objects_to(norm: float) -> bool:
        return Guard(GuardSettings(spike=spike), norms).objection(norm) is not None

    limit = Guard(GuardSettings(spike=spike), norms).limit
    assert not objects_to(limit)
    assert objects_to(math.nextafter(limit, math.inf))
