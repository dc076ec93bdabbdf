"""A plan as a terminal of 80 columns shows it: one sentence, strategies side by side, where time and memory go."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from cubeloom.base.units import count
from cubeloom.plan.cost_model.recompute import RECOMPUTE
from cubeloom.plan.search import Answer, Plan, Strategy, different, usual, why

_WIDTH = 80
_GRID, _SCHEDULE = 27, 19
_HEAD = f"    {'grid':{_GRID}} {'schedule':{_SCHEDULE}} {'step':>8} {'MFU':>7} {'memory':>9}"


def words(answer: Answer, top: int | None = None) -> Iterator[str]:
    """Of so many of the best plans; or of strategies that differ, and the usual ones beside them."""
    if answer.plans:
        best = answer.plans[0]
        yield from _wrapped(sentence(answer, best))
        shown = different(answer) if top is None else answer.plans[:top]
        yield from ("", _HEAD)
        for place, plan in enumerate(shown, start=1):
            yield from _plan(answer, f"{place:>2}", plan)
        if top is None:
            yield from ("", "the usual strategies on the same devices:")
            for strategy in usual(answer):
                yield from _usual(answer, strategy)
        yield ""
        yield from _wrapped(_memory(answer, best))
        moved = ", ".join(f"{axis} {three_gb(float(size))}" for axis, size in sorted(answer.bytes(best).items()))
        yield from _wrapped(f"received by rank 0 in a step: {moved}")
    refused = ", ".join(f"{number:,} {reason}" for reason, number in list(answer.refused.items())[:4])
    yield from _wrapped(
        f"{answer.considered:,} decompositions in {answer.seconds:.2f} s; refused: {refused or 'none'}"
        + (", ..." if len(answer.refused) > 4 else "")
    )


def sentence(answer: Answer, best: Plan) -> str:
    what = "tokens/s" if answer.model.tokens else "samples/s"
    low, high = (time(best.seconds * (1 + sign * best.error)) for sign in (-1, 1))
    return (
        f"{best.grid} under {best.shape.title} is fastest: {time(best.seconds)} a step ({low} to {high}), "
        f"{count(answer.per_second(best))} {what}, MFU {answer.mfu(best):.1%}, {three_gb(best.total_memory)} of "
        f"{three_gb(answer.cluster.device.memory)} a device."
    )


def _plan(answer: Answer, head: str, plan: Plan) -> Iterator[str]:
    grid, schedule = str(plan.grid), f"{plan.shape.title} {plan.microbatches}×{plan.microbatch}"
    figures = f"{time(plan.seconds):>8} {answer.mfu(plan):>7.1%} {three_gb(plan.total_memory):>9}"
    fits = len(grid) <= _GRID and len(schedule) <= _SCHEDULE
    if not fits:  # what is long stands on a line of its own
        yield f"{head:3} {grid}"
        grid = ""
    yield f"{head if fits else '':3} {grid:{_GRID}} {schedule:{_SCHEDULE}.{_SCHEDULE}} {figures}"
    best = answer.plans[0]
    if plan is not best:
        slower = plan.seconds / best.seconds - 1
        yield from _wrapped(f"{slower:+.1%}: {why(plan, best)}" if slower >= 0.0005 else "as fast", "      ")
    yield from _wrapped(details(plan), "      ")


def details(plan: Plan) -> str:
    wide = [axis for axis in reversed(plan.grid.placement) if plan.grid.size(axis) > 1]
    activations, weights, inputs = plan.rest.split("/")
    parts = [
        f"{wide[0]} innermost" if wide else "",
        f"activations {activations}" if plan.grid.x * plan.grid.y > 1 else "",
        f"weights {weights}" if plan.grid.z > 1 else "",
        f"inputs {inputs}" if plan.grid.x * plan.grid.y > 1 and plan.sharded else "",
        f"{plan.ways} strands" if plan.ways > 1 else "",
        "" if not plan.recompute else f"recompute {RECOMPUTE[plan.recompute]}",
        f"bubble {plan.bubble / plan.seconds:.1%}",
        f"exposed communication {plan.exposed / plan.seconds:.1%}",
    ]
    return ", ".join(filter(None, parts))


def _usual(answer: Answer, strategy: Strategy) -> Iterator[str]:
    if strategy.plan is None:
        yield from _wrapped(f"{strategy.name}: cannot run ({strategy.refused})", "  ")
        return
    yield f"  {strategy.name}"
    yield from _plan(answer, "", strategy.plan)


def _memory(answer: Answer, best: Plan) -> str:
    room = ", ".join(f"{name} {three_gb(size)}" for name, size in best.memory.items() if size >= 5e6)
    free = answer.task.room(answer.cluster) - best.total_memory
    return f"memory of the first: {room}; {three_gb(free)} more would fit"


def time(seconds: float) -> str:
    """`6.12 s`, `31.4 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def three_gb(size: float) -> str:
    """`31.2 GB`, `24 MB`."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent + ("  " if indent else ""), break_on_hyphens=False
    )
