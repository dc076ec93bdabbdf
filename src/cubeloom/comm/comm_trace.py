"""Records when communications started, were awaited and finished; and simulates a slower network."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cubeloom.comm.ledger import Entry


class SimulatedLink:
    """A network that transfers one message after another at this speed, whatever the real one does. For measurements."""

    def __init__(self, bytes_per_second: float) -> None:
        self._speed = bytes_per_second
        self._free = 0.0  # when the last message has been transferred

    def carry(self, entry: Entry) -> tuple[float, float]:
        """When the transfer would end, and its duration."""
        duration = float(entry.received) / self._speed
        self._free = max(time.perf_counter(), self._free) + duration
        return self._free, duration


@dataclass
class Transfer:
    """One communication on this rank, in seconds of its clock."""

    number: int
    entry: Entry
    started: float
    until: float = 0.0  # when the simulated link finishes it
    duration: float = 0.0  # on the simulated link
    awaited: float | None = None
    done: float | None = None

    @property
    def blocked(self) -> float:
        """How long this rank only waited for it."""
        assert self.awaited is not None and self.done is not None
        return self.done - self.awaited

    def finish(self) -> None:
        """Called when the real network is done; waits for the simulated link."""
        rest = self.until - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        self.done = time.perf_counter()


@dataclass
class CommTrace:
    transfers: list[Transfer] = field(default_factory=list)
    order: list[tuple[str, Transfer]] = field(default_factory=list)  # "start" and "wait", in order

    def __str__(self) -> str:
        """`+0 +1 -0 -1`: starts and waits of the transfers, by number."""
        return " ".join(f"{'+' if what == 'start' else '-'}{transfer.number}" for what, transfer in self.order)
