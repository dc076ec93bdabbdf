"""Proof that a schedule can be run and computes the right thing, or precisely what is wrong with it.

What is proved:
- every action names a stage, micro-batch and replica that exist, and each stage of a replica lives on one worker;
- each micro-batch is forwarded once and backwarded once (whole, as I and W, or in halves) on each stage of its replica;
- every dependency is met in an order that ends, with buffered sends and with blocking ones;
- on each directed edge receives come in the order of sends, so that channels need no tags;
- every stage's replicas reduce their gradients once, after the last of them, in an order that all workers share;
- an asynchronous schedule takes every gradient into one update, and has the weights that its forwards ask for;
- activations in flight stay under the cap, if one is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cubeloom.base.errors import UserError
from cubeloom.pipeline import _checks as checks
from cubeloom.pipeline.schedule import Schedule

# In this order: a later proof may rely on what an earlier one has shown.
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
    """What is wrong, in words; empty for a right schedule. Stops at the first proof that fails."""
    for proof in _PROOFS:
        found = list(proof(schedule))
        if found:
            return found
    return [] if cap is None else list(checks.memory_cap(schedule, cap))


def check(schedule: Schedule, cap: float | None = None) -> Schedule:
    """The schedule itself if it is right; otherwise an error that says what is wrong."""
    found = problems(schedule, cap)
    if found:
        shown = found[:5] + ([f"and {len(found) - 5} more"] if len(found) > 5 else [])
        raise UserError(f"schedule {schedule.name} is wrong: " + "; ".join(shown))
    return schedule
