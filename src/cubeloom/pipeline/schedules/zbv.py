"""ZBV (Qi et al. 2024): two chunks per worker in a V, down the workers and back, with split backward.

The worker with the first stage also has the last one, so its first backward starts at once. With F = I = W no worker
idles between its first and its last action.
"""

from __future__ import annotations

from cubeloom.pipeline.action import Action, Kind
from cubeloom.pipeline.schedule import Row, Schedule
from cubeloom.pipeline.schedules._common import at_least_one

F, I, W = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741


def zbv(workers: int, microbatches: int) -> Schedule:
    at_least_one("zbv", workers, microbatches)
    rows = tuple(_row(worker, workers, microbatches) for worker in range(workers))
    return Schedule("zbv", 2 * workers, microbatches, rows)


def _row(worker: int, workers: int, microbatches: int) -> Row:
    # The timetable needs at least 2p - 1 micro-batches; a shorter step is that one without the missing micro-batches.
    total = max(microbatches, 2 * workers - 1)
    stages = (worker, 2 * workers - 1 - worker)
    row: list[Action] = []
    done = {(kind, chunk): 0 for kind in (F, I, W) for chunk in (0, 1)}

    def add(*steps: tuple[Kind, int]) -> None:
        for kind, chunk in steps:
            row.append(Action(stages[chunk], kind, done[kind, chunk]))
            done[kind, chunk] += 1

    for _ in range(2 * (workers - worker) - 1):
        add((F, 0))
    for _ in range(worker):
        add((F, 1), (F, 0))
    for _ in range(workers - worker):
        add((F, 1), (I, 1), (W, 1))
    while done[F, 1] < total:
        if done[F, 0] < total:
            add((F, 0))
        add((I, 0), (W, 0), (F, 1), (I, 1), (W, 1))
    for _ in range(worker):
        add((I, 0), (I, 1))
    for _ in range(workers - worker):
        add((I, 0), (W, 0))
    for chunk in (1, 0):
        add(*[(W, chunk)] * (total - done[W, chunk]))
    return tuple(action for action in row if action.microbatch < microbatches)
