"""ZB-H1 and ZB-H2 (Qi et al. 2024): the backward is split, and weight gradients fill the bubbles."""

from __future__ import annotations

from collections.abc import Callable

from cubeloom.pipeline.action import Action, forward, input_grad, weight_grad
from cubeloom.pipeline.schedule import Row, Schedule
from cubeloom.pipeline.schedules._common import at_least_one
from cubeloom.pipeline.schedules.interleaved import Walk

Visit = Callable[[int], tuple[int, int]]  # the i-th (stage, micro-batch) of a worker


def zb_h1(workers: int, microbatches: int, chunks: int = 1) -> Schedule:
    """No more activations than 1F1B: worker r defers r weight gradients. With more chunks it is interleaved."""
    walk = Walk.of("zb-h1", workers, microbatches, chunks) if chunks != 1 else None
    at_least_one("zb-h1", workers, microbatches)
    rows = []
    for worker in range(workers):
        warmup = workers - 1 - worker
        if walk is None:
            rows.append(_row(_linear(worker), _linear(worker), microbatches, warmup, worker))
        else:
            ahead = warmup + (chunks - 1) * walk.round
            visits = _bound(walk.forward, worker), _bound(walk.backward, worker)
            rows.append(_row(*visits, walk.total, ahead, worker))
    return Schedule("zb-h1", workers * chunks, microbatches, tuple(rows))


def zb_h2(workers: int, microbatches: int) -> Schedule:
    """Twice the warm-up and the delay: 2p - 1 micro-batches in flight, and from N = 2p - 1 up no bubble inside."""
    at_least_one("zb-h2", workers, microbatches)
    rows = tuple(
        _row(_linear(worker), _linear(worker), microbatches, 2 * (workers - 1 - worker), 2 * worker)
        for worker in range(workers)
    )
    return Schedule("zb-h2", workers, microbatches, rows)


def _row(forwards: Visit, backwards: Visit, total: int, warmup: int, delay: int) -> Row:
    """`warmup` forwards, then F (while there are any), I and the W of `delay` turns ago, then the remaining W."""
    warmup = min(warmup, total)
    row: list[Action] = [forward(*forwards(i)) for i in range(warmup)]
    for i in range(total):
        if warmup + i < total:
            row.append(forward(*forwards(warmup + i)))
        row.append(input_grad(*backwards(i)))
        if i >= delay:
            row.append(weight_grad(*backwards(i - delay)))
    row += [weight_grad(*backwards(i)) for i in range(max(0, total - delay), total)]
    return tuple(row)


def _linear(worker: int) -> Visit:
    return lambda i: (worker, i)


def _bound(visit: Callable[[int, int], tuple[int, int]], worker: int) -> Visit:
    return lambda i: visit(worker, i)
