"""A pipeline schedule as a value: for each worker, the ordered actions of one training step.

Everything else follows from the rows: which worker has which stage of which replica, which replica a micro-batch
belongs to, whether backwards are halved. A printed, saved or drawn schedule therefore has all that the runtime needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from cubeloom.base.errors import UserError
from cubeloom.pipeline.action import Action, Kind

Row = tuple[Action, ...]
_FOOT = re.compile(r"(?P<name>\S+): (?P<stages>\d+) stages, (?P<microbatches>\d+) micro-batches")
_IDLE = "-"  # the row of an idle worker


class Updates(StrEnum):
    """When weights are updated, and which version a micro-batch uses, the same from its forward to its backward."""

    FLUSH = "flush"  # one update after all micro-batches: synchronous
    NEWEST = "newest"  # an update after every micro-batch; a forward uses the newest version of its stage (PipeDream)
    PREVIOUS = "previous"  # an update after every group; a group uses the version before the newest (2BW)


@dataclass(frozen=True)
class Schedule:
    name: str
    stages: int
    microbatches: int
    workers: tuple[Row, ...]

    def __str__(self) -> str:
        rows = [" ".join(map(str, row)) or _IDLE for row in self.workers]
        return "\n".join([*rows, f"{self.name}: {self.stages} stages, {self.microbatches} micro-batches"])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The inverse of `str`: one line per worker, then `name: 4 stages, 8 micro-batches`."""
        *rows, foot = text.strip().splitlines() or [""]
        match = _FOOT.fullmatch(foot.strip())
        if match is None:
            raise UserError(f"the last line of a schedule reads 'NAME: 4 stages, 8 micro-batches', got {foot!r}")
        workers = tuple(parse_row([] if row.strip() == _IDLE else row.split()) for row in rows)
        return cls(match["name"], int(match["stages"]), int(match["microbatches"]), workers)

    @property
    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every action with its worker, worker by worker."""
        return ((worker, action) for worker, row in enumerate(self.workers) for action in row)

    @cached_property
    def homes(self) -> dict[tuple[int, int], int]:
        """The worker of each (replica, stage). It is unique only in a checked schedule."""
        return {(action.replica, action.stage): worker for worker, action in self.actions}

    @cached_property
    def replicas(self) -> int:
        return 1 + max((action.replica for _, action in self.actions), default=0)

    @cached_property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """`placement[replica][stage]` is the stage's worker."""
        return tuple(tuple(self.homes[r, s] for s in range(self.stages)) for r in range(self.replicas))

    @cached_property
    def assignment(self) -> tuple[int, ...]:
        """The replica of each micro-batch."""
        owner = {action.microbatch: action.replica for _, action in self.actions if action.kind is Kind.FORWARD}
        return tuple(owner[m] for m in range(self.microbatches))

    @cached_property
    def halved(self) -> bool:
        """Whether micro-batches are cut in two halves. To the runtime each half is its own micro-batch."""
        return any(action.part is not None for _, action in self.actions)

    @cached_property
    def updates(self) -> Updates:
        firsts = {action.microbatch for _, action in self.actions if action.kind is Kind.UPDATE}
        if not firsts:
            return Updates.FLUSH
        return Updates.NEWEST if 0 in firsts else Updates.PREVIOUS

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The group of each micro-batch: micro-batches whose gradients go into one update."""
        ends = sorted({action.microbatch for _, action in self.actions if action.kind is Kind.UPDATE})
        return tuple(sum(end < microbatch for end in ends) for microbatch in range(self.microbatches))

    @property
    def chunk(self) -> float:
        """The size of a stage as a fraction of a worker's share of the model: 1/2 if a worker has two stages."""
        return len(self.workers) / self.stages

    def held_by(self, worker: int) -> list[tuple[int, int]]:
        """The (replica, stage) pairs of the worker, in order."""
        return sorted(pair for pair, home in self.homes.items() if home == worker)


def forwards(schedule: Schedule) -> Schedule:
    """The schedule's forwards only, for an evaluation."""
    rows = tuple(tuple(action for action in row if action.kind is Kind.FORWARD) for row in schedule.workers)
    return Schedule(schedule.name, schedule.stages, schedule.microbatches, rows)


def parse_row(cells: Iterable[str]) -> Row:
    return tuple(Action.parse(cell) for cell in cells)
