"""Measures where the time of a step went on this rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cubeloom.comm.devices import Instant
from cubeloom.comm.recorder import Waits


@dataclass(frozen=True)
class Span:
    """An action, in seconds from the start of the step."""

    action: str
    start: float
    end: float


class StepTimes:
    """Observes every action of a step. On a GPU the times are the stream's and can be read after `settle`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = Instant(device)
        self._starts: list[Instant] = []
        self._ends: list[tuple[str, Instant]] = []

    def at(self, place: str) -> None:
        self._starts.append(Instant(self._device))

    def done(self, action: str) -> None:
        self._ends.append((action, Instant(self._device)))

    def spans(self, waits: Waits) -> list[Span]:
        """The start and end of each action. An action starts when its input has arrived, so a bubble shows as a gap."""
        received = [wait[2] for wait in waits if wait[0].startswith("receive")]
        found = []
        for start, (action, end) in zip(self._starts, self._ends, strict=True):
            begin, last = start.since(self._begin), end.since(self._begin)
            # An action first waits for its input.
            came = [at for at in (each.since(self._begin) for each in received) if begin <= at <= last]
            found.append(Span(action, max([begin, *came]), last))
        return found


@dataclass(frozen=True)
class Waiting:
    """Seconds of a step in which this rank only waited."""

    for_stages: float  # for other stages of the pipeline: bubbles, and late messages
    for_collectives: float

    @classmethod
    def of(cls, waits: Waits) -> Waiting:
        stages = sum(end.since(begin) for what, begin, end in waits if what.startswith("receive"))
        return cls(stages, sum(end.since(begin) for _, begin, end in waits) - stages)
