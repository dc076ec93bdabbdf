"""When communications were started, awaited and done; and a wire that makes them as slow as a network one does not have."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cubeloom.comm.ledger import Entry


class SimulatedLink:
    """A network that carries one message after another at this speed, whatever the true one does. For measurements."""

    def __init__(self, bytes_per_second: float) -> None:
        self._speed = bytes_per_second
        self._free = 0.0  # when the last message is through

    def carry(self, entry: Entry) -> tuple[float, float]:
        """When it would be through, and how long it is on the wire."""
        duration = float(entry.received) / self._speed
        self._free = max(time.perf_counter(), self._free) + duration
        return self._free, duration


@dataclass
class Transfer:
    """One communication on this rank, in seconds of its clock."""

    number: int
    entry: Entry
    started: float
    until: float = 0.0  # not done before, by the wire
    duration: float = 0.0  # on the wire
    awaited: float | None = None
    done: float | None = None

    @property
    def blocked(self) -> float:
        """How long this rank did nothing but wait for it."""
        assert self.awaited is not None and self.done is not None
        return self.done - self.awaited

    def finish(self) -> None:
        """The true network is done; the wire may not be."""
        rest = self.until - time.perf_counter()
        if rest > 0:
            time.sleep(rest)
        self.done = time.perf_counter()


@dataclass
class CommTrace:
    transfers: list[Transfer] = field(default_factory=list)
    order: list[tuple[str, Transfer]] = field(default_factory=list)  # "start" and "wait", as they came

    def __str__(self) -> str:
        """`+0 +1 -0 -1`: starts and waits of the transfers, by number."""
        return " ".join(f"{'+' if what == 'start' else '-'}{transfer.number}" for what, transfer in self.order)
