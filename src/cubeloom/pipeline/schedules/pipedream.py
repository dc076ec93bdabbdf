"""PipeDream and PipeDream-2BW (Narayanan et al. 2019, 2021): 1F1B that never flushes, at the price of stale weights.

A step here is a segment of the endless stream: N micro-batches with one fill and one drain. `memory.versions` gives the
weight version of each micro-batch, which both schedules keep from its forward to its backward.
"""

from __future__ import annotations

from cubeloom.pipeline.action import Action, Kind
from cubeloom.pipeline.schedule import Row, Schedule
from cubeloom.pipeline.schedules._common import at_least_one, refuse
from cubeloom.pipeline.schedules.one_f_one_b import one_f_one_b_row


def pipedream(stages: int, microbatches: int) -> Schedule:
    """An update after every micro-batch: stage s keeps up to D - s versions."""
    at_least_one("pipedream", stages, microbatches)
    return Schedule("pipedream", stages, microbatches, _updating(stages, microbatches, every=1))


def pipedream_2bw(stages: int, microbatches: int) -> Schedule:
    """An update after every D micro-batches, and two versions: W(t+1) = W(t) - lr · gradient at W(t-1)."""
    refuse("pipedream-2bw", "stages", "at least two stages", stages, lambda d: d >= 2)
    rule = f"whole groups of {stages} micro-batches, one a stage"
    refuse("pipedream-2bw", "microbatches", rule, microbatches, lambda n: n >= stages and n % stages == 0)
    return Schedule("pipedream-2bw", stages, microbatches, _updating(stages, microbatches, every=stages))


def _updating(stages: int, microbatches: int, every: int) -> tuple[Row, ...]:
    rows = []
    for stage in range(stages):
        row: list[Action] = []
        for action in one_f_one_b_row(stage, stages, microbatches):
            row.append(action)
            if action.kind is Kind.BACKWARD and (action.microbatch + 1) % every == 0:
                row.append(Action(stage, Kind.UPDATE, action.microbatch))
        rows.append(tuple(row))
    return tuple(rows)
