"""Interleaved 1F1B (Narayanan et al. 2021): each worker holds several chunks, so that the pipeline fills sooner.

Chunk c of worker r is stage c·p + r. Micro-batches go in rounds of about p; within a round each chunk takes its turn.
The zero-bubble variant (ZB-H1) is the same walk with another warm-up and deferred weight gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from cubeloom.pipeline.action import Action, backward, forward
from cubeloom.pipeline.schedule import Row, Schedule
from cubeloom.pipeline.schedules._common import at_least_one, refuse


def interleaved(workers: int, microbatches: int, chunks: int = 2) -> Schedule:
    walk = Walk.of("interleaved", workers, microbatches, chunks)
    rows = tuple(_row(walk, worker) for worker in range(workers))
    return Schedule("interleaved", workers * chunks, microbatches, rows)


def _row(walk: Walk, worker: int) -> Row:
    warmup = min(2 * (walk.workers - 1 - worker) + (walk.chunks - 1) * walk.round, walk.total)
    row: list[Action] = [forward(*walk.forward(worker, i)) for i in range(warmup)]
    for i in range(walk.total):
        if warmup + i < walk.total:
            row.append(forward(*walk.forward(worker, warmup + i)))
        row.append(backward(*walk.backward(worker, i)))
    return tuple(row)


@dataclass(frozen=True)
class Walk:
    """The order in which a worker visits its (stage, micro-batch) pairs."""

    workers: int
    chunks: int
    round: int  # micro-batches in a round
    total: int  # forwards of one worker

    @classmethod
    def of(cls, name: str, workers: int, microbatches: int, chunks: int) -> Walk:
        at_least_one(name, workers, microbatches)
        refuse(name, "chunks", "at least one chunk for each worker", chunks, lambda v: v >= 1)
        rule = f"micro-batches in equal rounds of at least {workers} (or a single shorter one)"
        refuse(name, "microbatches", rule, microbatches, lambda n: n % max(1, n // workers) == 0)
        rounds = max(1, microbatches // workers)
        return cls(workers, chunks, microbatches // rounds, microbatches * chunks)

    def forward(self, worker: int, i: int) -> tuple[int, int]:
        turn, within = divmod(i, self.round)
        return turn % self.chunks * self.workers + worker, turn // self.chunks * self.round + within

    def backward(self, worker: int, i: int) -> tuple[int, int]:
        turn, within = divmod(i, self.round)
        chunk = self.chunks - 1 - turn % self.chunks
        return chunk * self.workers + worker, turn // self.chunks * self.round + within
