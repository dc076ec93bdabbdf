"""1F1B (DAPPLE, Fan et al. 2021): after a warm-up a forward and a backward alternately, which keeps few activations."""

from __future__ import annotations

from cubeloom.pipeline.action import Action, backward, forward
from cubeloom.pipeline.schedule import Row, Schedule
from cubeloom.pipeline.schedules._common import at_least_one


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    at_least_one("1f1b", stages, microbatches)
    rows = tuple(one_f_one_b_row(stage, stages, microbatches) for stage in range(stages))
    return Schedule("1f1b", stages, microbatches, rows)


def one_f_one_b_row(stage: int, stages: int, microbatches: int) -> Row:
    """A warm-up forward for each later stage, then F, B, F, B, ..."""
    warmup = min(microbatches, stages - 1 - stage)
    row: list[Action] = [forward(stage, m) for m in range(warmup)]
    for m in range(microbatches):
        if warmup + m < microbatches:
            row.append(forward(stage, warmup + m))
        row.append(backward(stage, m))
    return tuple(row)
