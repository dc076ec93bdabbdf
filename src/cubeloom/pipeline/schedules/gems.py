"""GEMS (Jain et al. 2020): two replicas in opposite directions, one micro-batch at a time; least memory, most idle
time.
"""

from __future__ import annotations

from cubeloom.pipeline.action import backward, forward
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.schedules._common import at_least_one, even_stages, mirrored


def gems(stages: int, microbatches: int) -> Schedule:
    """Micro-batches alternate between the replicas; the forward of one follows the backward of the one before."""
    even_stages("gems", stages)
    at_least_one("gems", stages, microbatches)
    rows = []
    for worker in range(stages):
        stage = [line.index(worker) for line in mirrored(stages)]
        pairs = [(forward(stage[m % 2], m, m % 2), backward(stage[m % 2], m, m % 2)) for m in range(microbatches)]
        rows.append(tuple(action for pair in pairs for action in pair))
    return Schedule("gems", stages, microbatches, tuple(rows))
