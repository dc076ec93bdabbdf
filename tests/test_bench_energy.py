"""Energy of steps: power from the counter's own ticks, so that it does not matter when a step begins between two of them."""

from __future__ import annotations

import time

import pytest
from bench.energy import Cost, cost_of, cost_table

pytestmark = pytest.mark.timeout(60)


class Chip:
    """Always takes 100 W at 1500 MHz; its counter changes every 50 ms of a time that only its steps let pass."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        time.sleep(0.001)  # let the counter be read
        self.steps += 1

    def now(self) -> float:
        return self.steps * 0.01

    def settle(self) -> None:
        pass

    def joules(self) -> float:
        return 100 * (self.steps // 5) * 0.05

    def megahertz(self) -> int:
        return 1500


def test_power_is_that_between_ticks_of_the_counter() -> None:
    chip = Chip()
    cost = cost_of("a", chip.step, chip, chip.settle, 4.0, chip.now)
    assert cost.step_ms == pytest.approx(10) and cost.megahertz == 1500
    assert cost.watts == pytest.approx(100, rel=0.1)
    assert cost_table([cost], (700.0, 1980)).row_count == 1


def test_a_counter_that_stands_still_says_nothing() -> None:
    chip = Chip()
    with pytest.raises(ValueError, match="measure for longer"):
        cost_of("a", chip.step, chip, chip.settle, 0.02, chip.now)


def test_a_step_costs_its_power_times_its_time() -> None:
    assert Cost("a", step_ms=250.0, watts=700.0, megahertz=1500).joules == pytest.approx(175.0)
