"""Plans for FP8: faster products, smaller gathers, and the bytes that a rank then counts."""

from __future__ import annotations

import pytest

from cubeloom import Grid, UserError
from cubeloom.plan.search import search
from cubeloom.tools.rehearse import rehearsed

TINY = ("gpt-tiny", "dgx-h100", 8, 8, 16)


@pytest.mark.slow
def test_a_rank_counts_the_bytes_that_the_plan_says() -> None:
    answer = search(*TINY, only=Grid(x=2, y=2, z=2), precision="fp8")
    (tried,) = rehearsed(answer, 1).passed
    assert tried.bytes_agree


def test_products_take_less_time_and_gathers_fewer_bytes() -> None:
    on = Grid(data=2, z=8, y=4)
    plain, fp8 = (search("llama3-8b", "dgx-h100", 64, 256, only=on, precision=each) for each in ("model", "fp8"))
    best, other = fp8.plans[0], plain.plans[0]
    assert best.seconds < 0.9 * other.seconds
    assert sum(fp8.bytes(best).values()) < sum(plain.bytes(best).values())


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="has no rate of FP8"):
        search("gpt-tiny", "perlmutter", 8, 8, precision="fp8")
    with pytest.raises(UserError, match="no linear on tokens"):
        search("unet-small", "dgx-h100", 8, 8, precision="fp8")
