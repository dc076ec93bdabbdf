"""Search for a better list order: first a few plausible urgencies, then seeded random ones, until the bound is met."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cubeloom.pipeline.action import Action, Kind
from cubeloom.pipeline.bounds import lower_bound
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.listing import Layout, Urgency, listed, nearest_end, urgency
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.simulator import simulate

# Urgency, reserve, split. Whole backwards can win if messages are expensive and weight gradients cheap.
_PLAIN = (
    ("IFW", 1.0, True),
    ("FIW", 0.0, True),
    ("FIW", 0.5, True),
    ("IFW", 0.25, True),
    ("FIW", 0.25, True),
    ("IFW", 0.5, True),
    ("IFW", 0.0, True),
    ("IFW", 1.0, False),
)
_RANKS = {Kind.FORWARD: 0.0, Kind.BACKWARD: 1.0, Kind.INPUT_GRAD: 1.0, Kind.WEIGHT_GRAD: 2.0}


@dataclass(frozen=True)
class Found:
    """The fastest order of a search. No order with this placement and cap takes less than `bound`."""

    schedule: Schedule
    makespan: float
    bound: float


def search(name: str, layout: Layout, costs: Costs, cap: float, tries: int = 1000, effort: int = 150_000) -> Found:
    """The same input always finds the same order. Stops when the lower bound is met.

    `effort` limits the number of actions that are ordered: 100 000 take about two seconds.
    """
    bound = lower_bound(layout, costs, cap)
    size = 3 * layout.stages * sum(map(len, layout.microbatches))
    generator = random.Random(0)
    best: Found | None = None
    for attempt in range(max(len(_PLAIN), min(tries, effort // size))):
        key, reserve, split = _attempt(attempt, generator)
        schedule = listed(name, layout, costs, cap, split=split, key=key, reserve=reserve)
        makespan = simulate(schedule, costs).makespan
        if best is None or makespan < best.makespan - 1e-9:
            best = Found(schedule, makespan, bound)
        if best.makespan <= bound + 1e-9:
            break
    assert best is not None
    return best


def _attempt(attempt: int, generator: random.Random) -> tuple[Urgency, float, bool]:
    """One attempt: an urgency, the reserve to use with it, and whether to split backwards.

    The plain ones come first, starting with input gradients first and an evenly divided cap; then random ones.
    """
    if attempt < len(_PLAIN):
        order, reserve, split = _PLAIN[attempt]
        return urgency(order), reserve, split
    reserve = generator.choice((0.0, 0.25, 0.5, 0.75))
    return (_by_stage(generator) if attempt % 2 else _by_action(generator)), reserve, True


def _by_stage(generator: random.Random) -> Urgency:
    """F, I and W of each stage with random weights against each other, W mostly last."""
    ranks: dict[tuple[Kind, int], float] = {}

    def key(action: Action) -> tuple[float, ...]:
        place = (action.kind, action.stage)
        if place not in ranks:
            middle = 2.0 if action.kind is Kind.WEIGHT_GRAD else 0.5
            ranks[place] = generator.gauss(middle, 0.5)
        return ranks[place], *nearest_end(action)

    return key


def _by_action(generator: random.Random) -> Urgency:
    """F, I, W in this order, with some actions exchanged at random."""
    ranks: dict[Action, float] = {}
    share = generator.choice((0.03, 0.1, 0.2, 0.5))

    def key(action: Action) -> tuple[float, ...]:
        if action not in ranks:
            moved = generator.random() < share
            ranks[action] = float(generator.randrange(3)) if moved else _RANKS[action.kind]
        return ranks[action], *nearest_end(action)

    return key
