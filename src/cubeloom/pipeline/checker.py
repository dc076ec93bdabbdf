"""Proves that a schedule can be run and computes the right result, or says what is wrong with it.

What is proved:
- every action names an existing stage, micro-batch and replica, and each stage of a replica is on one worker;
- each micro-batch is forwarded once and backwarded once (whole, as I and W, or in halves) on each stage of its replica;
- the dependencies do not deadlock, neither with buffered sends nor with blocking ones;
- on each directed edge receives are in the order of sends, so channels need no tags;
- every stage's replicas reduce their gradients once, after the last gradient, in the same order on all workers;
- in an asynchronous schedule every gradient is part of one update, and the weights that forwards use exist;
- activations in flight stay under the cap, if one is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cubeloom.base.errors import UserError
from cubeloom.pipeline import _checks as checks
from cubeloom.pipeline.schedule import Schedule

# In this order: a later proof may assume what an earlier one has shown.
_PROOFS: tuple[Callable[[Schedule], Iterator[str]], ...] = (
    checks.names,
    checks.homes,
    checks.completeness,
    checks.local_order,
    checks.dependencies,
    checks.blocking,
    checks.reductions,
    checks.updates,
)


def problems(schedule: Schedule, cap: float | None = None) -> list[str]:
    """Descriptions of what is wrong; empty for a correct schedule. Stops at the first proof that fails."""
    for proof in _PROOFS:
        found = list(proof(schedule))
        if found:
            return found
    return [] if cap is None else list(checks.memory_cap(schedule, cap))


def check(schedule: Schedule, cap: float | None = None) -> Schedule:
    """Return the schedule if it is correct; otherwise raise an error that says what is wrong."""
    found = problems(schedule, cap)
    if found:
        shown = found[:5] + ([f"and {len(found) - 5} more"] if len(found) > 5 else [])
        raise UserError(f"schedule {schedule.name} is wrong: " + "; ".join(shown))
    return schedule
