"""DualPipe and DualPipeV (DeepSeek-V3, 2024): two streams that meet on every worker, in eight steps.

In DualPipe the streams are two replicas in opposite directions, in DualPipeV the two arms of a V of one replica. Where
the original overlaps a forward with a backward of the other stream, the two run here one after the other, forward
first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cubeloom.pipeline.action import Action, Kind
from cubeloom.pipeline.schedule import Row, Schedule
from cubeloom.pipeline.schedules._common import even_stages, refuse


def dualpipe(stages: int, microbatches: int) -> Schedule:
    """Micro-batches 0 to N/2-1 run downwards, the others upwards."""
    even_stages("dualpipe", stages)
    rule = f"an even number of micro-batches, at least twice its {stages} stages"
    refuse("dualpipe", "microbatches", rule, microbatches, lambda n: n % 2 == 0 and n >= 2 * stages)
    half = microbatches // 2
    rows = []
    for worker in range(stages):
        own = int(worker >= stages // 2)  # the stream that enters at this worker's end
        streams = tuple(_Stream(worker if r == 0 else stages - 1 - worker, r, r * half) for r in (own, 1 - own))
        rows.append(_row(streams, min(worker, stages - 1 - worker), stages // 2, half))
    return Schedule("dualpipe", stages, microbatches, tuple(rows))


def dualpipev(workers: int, microbatches: int) -> Schedule:
    rule = f"at least as many micro-batches as its {2 * workers} stages"
    refuse("dualpipev", "stages", "at least one worker", workers, lambda d: d >= 1)
    refuse("dualpipev", "microbatches", rule, microbatches, lambda n: n >= 2 * workers)
    rows = []
    for worker in range(workers):
        streams = (_Stream(worker), _Stream(2 * workers - 1 - worker))
        rows.append(_row(streams, worker, workers, microbatches))
    return Schedule("dualpipev", 2 * workers, microbatches, tuple(rows))


@dataclass
class _Stream:
    """One stage of the worker, with its numbers of completed forwards and backwards."""

    stage: int
    replica: int = 0
    first: int = 0
    forwards: int = 0
    backwards: int = 0


@dataclass
class _Writer:
    streams: tuple[_Stream, ...]
    row: list[Action] = field(default_factory=list)
    deferred: deque[Action] = field(default_factory=deque)  # deferred weight gradients, oldest first

    def repeat(self, count: int, steps: str) -> None:
        """Steps are F0, F1, B0, B1 (of the first or second stream), I0, I1 (with a deferred weight gradient) and W."""
        for _ in range(count):
            for step in steps.split():
                self.do(step)

    def do(self, step: str) -> None:
        if step == "W":
            self.row.append(self.deferred.popleft())
            return
        kind, stream = Kind(step[0]), self.streams[int(step[1])]
        done = stream.forwards if kind is Kind.FORWARD else stream.backwards
        action = Action(stream.stage, kind, stream.first + done, stream.replica)
        self.row.append(action)
        if kind is Kind.FORWARD:
            stream.forwards += 1
        else:
            stream.backwards += 1
        if kind is Kind.INPUT_GRAD:
            self.deferred.append(action._replace(kind=Kind.WEIGHT_GRAD))


def _row(streams: tuple[_Stream, ...], rank: int, half: int, microbatches: int) -> Row:
    """The eight steps. `rank` counts from the end where the first stream enters; `half` is the number of workers on a
    side.
    """
    write = _Writer(streams)
    far = half - rank - 1
    write.repeat(2 * far, "F0")
    write.repeat(rank + 1, "F0 F1")
    write.repeat(far, "I1 W F1")
    write.repeat(microbatches - 2 * half + rank + 1, "F0 B1 F1 B0")
    write.repeat(far, "B1 F1 B0")
    # The backwards of the second half of the rest are split: their weight gradients fill the end of the step.
    for i in range(2 * (rank + 1)):
        write.do(f"{'I' if i > rank else 'B'}{1 - i % 2}")
    write.repeat(far, "W I0")
    write.repeat(rank + 1, "W")
    return tuple(write.row)
