"""Records what a network's axes do, when asked to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cubeloom.comm.comm_trace import CommTrace, SimulatedLink, Transfer
from cubeloom.comm.devices import Instant
from cubeloom.comm.ledger import Entry, Ledger

# For each wait the operation, and when the device started and finished waiting.
Waits = list[tuple[str, Instant, Instant]]


class Recorder:
    def __init__(self, device: torch.device, wire: SimulatedLink | None = None) -> None:
        self.device = device
        self.waits: Waits | None = None
        self._ledger: Ledger | None = None
        self._journal: CommTrace | None = None
        self._wire = wire

    @contextmanager
    def recording(self) -> Iterator[Ledger]:
        """Record bytes in the ledger that is returned."""
        outer, self._ledger = self._ledger, Ledger()
        try:
            yield self._ledger
        finally:
            self._ledger = outer

    @contextmanager
    def timing(self) -> Iterator[CommTrace]:
        """Record times in the trace that is returned."""
        outer, self._journal = self._journal, CommTrace()
        try:
            yield self._journal
        finally:
            self._journal = outer

    @contextmanager
    def waiting(self) -> Iterator[Waits]:
        """Record waits in the list that is returned."""
        outer, self.waits = self.waits, []
        try:
            yield self.waits
        finally:
            self.waits = outer

    def start(self, operation: str, axis: str, ranks: int, size: int, origin: str) -> Transfer | None:
        """A communication starts. Returns a transfer to pass to `wait`, if times are recorded."""
        if self._ledger is None and self._journal is None and self._wire is None:
            return None
        entry = Entry(operation, axis, ranks, size, origin)
        if self._ledger is not None:
            self._ledger.entries.append(entry)
        if self._journal is None and self._wire is None:
            return None
        number = 0 if self._journal is None else len(self._journal.transfers)
        transfer = Transfer(number, entry, time.perf_counter())
        if self._wire is not None:
            transfer.until, transfer.duration = self._wire.carry(entry)
        if self._journal is not None:
            self._journal.transfers.append(transfer)
            self._journal.order.append(("start", transfer))
        return transfer

    def again(self, done: Ledger) -> None:
        """Add what a recording has communicated again."""
        if self._ledger is not None:
            self._ledger.entries += done.entries

    def wait(self, transfer: Transfer) -> None:
        """A rank starts to wait for it."""
        transfer.awaited = time.perf_counter()
        if self._journal is not None:
            self._journal.order.append(("wait", transfer))
