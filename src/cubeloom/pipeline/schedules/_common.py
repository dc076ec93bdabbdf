"""What generators share: errors with the nearest legal values, and rows from timetables."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cubeloom.base.errors import UserError
from cubeloom.base.limits import FORWARDS
from cubeloom.pipeline.action import Action
from cubeloom.pipeline.schedule import Row


def at_least_one(name: str, stages: int, microbatches: int) -> None:
    """Every schedule needs a stage and a micro-batch."""
    if stages < 1:
        raise UserError(f"{name} needs at least one stage, got {stages}; try 1")
    if microbatches < 1:
        raise UserError(f"{name} needs at least one micro-batch, got {microbatches}; try 1")


def not_too_long(name: str, stages: int, microbatches: int, chunks: int = 1) -> None:
    """Checked before anything is created that has an entry per stage or micro-batch."""
    if stages * microbatches * chunks > FORWARDS:
        many = f" of {chunks:,} chunks" if chunks > 1 else ""
        raise UserError(
            f"{name} with {stages:,} stages{many} and {microbatches:,} micro-batches has "
            f"{stages * microbatches * chunks:,} forwards: at most {FORWARDS:,} are looked at"
        )


def refuse(name: str, what: str, rule: str, got: int, legal: Callable[[int], bool]) -> None:
    """Raise unless `legal(got)`. The message names the nearest legal values on both sides."""
    if legal(got):
        return
    below = next((value for value in range(got - 1, 0, -1) if legal(value)), None)
    above = next((value for value in range(max(got, 0) + 1, max(got, 0) + 10_000) if legal(value)), None)
    nearest = " or ".join(str(value) for value in (below, above) if value is not None)
    raise UserError(f"{name} needs {rule}, got {what} = {got}; try {nearest}")


def even_stages(name: str, stages: int) -> None:
    refuse(name, "stages", "an even number of stages", stages, lambda d: d >= 2 and d % 2 == 0)


def by_slot(workers: int, timed: Iterable[tuple[int, int, Action]]) -> tuple[Row, ...]:
    """Rows from (slot, worker, action). Dependencies are in earlier slots, so any order within a slot is correct."""
    rows: list[list[tuple[int, int, Action]]] = [[] for _ in range(workers)]
    for order, (slot, worker, action) in enumerate(timed):
        rows[worker].append((slot, order, action))
    return tuple(tuple(action for _, _, action in sorted(row)) for row in rows)


def mirrored(stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two replicas in opposite directions: down has stage s on worker s, up on worker D-1-s."""
    return tuple(range(stages)), tuple(reversed(range(stages)))


def zigzag(workers: int, chunks: int) -> tuple[int, ...]:
    """The worker of each stage if the stages run down the workers, up again, and down again."""
    lines = [range(workers) if chunk % 2 == 0 else reversed(range(workers)) for chunk in range(chunks)]
    return tuple(worker for line in lines for worker in line)
