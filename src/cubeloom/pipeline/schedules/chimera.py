"""Chimera (Li & Hoefler 2021): pipelines in opposite directions through the same workers, with half the bubbles.

Of 2f pipelines, down i has stage s on worker s + i·D/f (mod D) and up i on worker D-1-s + i·D/f. A unit gives each
D/(2f) micro-batches. The m-th of them runs F at slot s + 2m and B at slot 2D-1-s + 2m. On every worker these slots
never collide, because D is even, and units 2D slots apart join without a gap. This is direct concatenation, for F = B.

If a backward costs two forwards, slots are made equally long in one of two ways. Doubling puts two micro-batches into a
forward slot, which takes twice the activations. Halving puts a whole micro-batch, as two halves one after the other,
into a forward slot and one half into a backward slot. Both have two backwards per forward slot, and units 3D slots
apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cubeloom.base.divisors import divisors
from cubeloom.base.errors import UserError
from cubeloom.pipeline.action import Action, backward, forward
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.schedules._common import at_least_one, by_slot, even_stages


class Mode(StrEnum):
    DIRECT = "direct"
    DOUBLING = "doubling"
    HALVING = "halving"


def chimera(stages: int, microbatches: int, pairs: int = 1, mode: Mode = Mode.DIRECT) -> Schedule:
    pipelines = chimera_pipelines("chimera", stages, microbatches, pairs)
    timed = (item for pipeline in pipelines for item in _timetable(pipeline, stages, pairs, mode))
    return Schedule("chimera", stages, microbatches, by_slot(stages, timed))


@dataclass(frozen=True)
class Pipeline:
    """One replica of the model: the worker of each stage, and its micro-batches in order."""

    replica: int
    workers: tuple[int, ...]
    microbatches: range


def chimera_pipelines(name: str, stages: int, microbatches: int, pairs: int) -> list[Pipeline]:
    """The 2f pipelines, without those that get no micro-batch. Micro-batches are divided as evenly as possible."""
    even_stages(name, stages)
    at_least_one(name, stages, microbatches)
    legal = divisors(stages // 2)
    if pairs not in legal:
        nearest = min(legal, key=lambda f: (abs(f - pairs), f))
        raise UserError(
            f"{name} with {stages} stages can have {', '.join(map(str, legal))} pairs of pipelines (the divisors of "
            f"{stages // 2}), got pairs = {pairs}; try {nearest}"
        )
    step = stages // pairs
    down = [tuple((s + i * step) % stages for s in range(stages)) for i in range(pairs)]
    up = [tuple((stages - 1 - s + i * step) % stages for s in range(stages)) for i in range(pairs)]
    lines = down + up
    each, rest = divmod(microbatches, 2 * pairs)
    # The remainder goes to down 0, up 0, down 1, up 1, ..., so that both directions stay equally full.
    lucky = [i // 2 + i % 2 * pairs for i in range(rest)]
    found: list[Pipeline] = []
    start = 0
    for index, workers in enumerate(lines):
        count = each + (index in lucky)
        if count:
            found.append(Pipeline(len(found), workers, range(start, start + count)))
        start += count
    return found


def _timetable(pipeline: Pipeline, stages: int, pairs: int, mode: Mode) -> Iterator[tuple[int, int, Action]]:
    """(slot, worker, action) of one pipeline: forwards and backwards of a unit, one unit after another."""
    parts: tuple[int | None, ...] = (0, 1) if mode is Mode.HALVING else (None,)
    in_slot = 1 if mode is Mode.DIRECT else 2  # forwards of micro-batches or of halves
    per_unit = stages // (2 * pairs) * in_slot
    period = 2 * stages if mode is Mode.DIRECT else 3 * stages
    for index, (m, part) in enumerate((m, part) for m in pipeline.microbatches for part in parts):
        unit, within = divmod(index, per_unit)
        for stage, worker in enumerate(pipeline.workers):
            begin = unit * period + stage
            yield begin + 2 * (within // in_slot), worker, forward(stage, m, pipeline.replica, part)
            begin = unit * period + 2 * stages - 1 - stage
            yield begin + 2 * within, worker, backward(stage, m, pipeline.replica, part)
