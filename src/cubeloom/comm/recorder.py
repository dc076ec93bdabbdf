"""Where a network's axes say what they do; nobody listens unless asked to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cubeloom.comm.comm_trace import CommTrace, SimulatedLink, Transfer
from cubeloom.comm.devices import Instant
from cubeloom.comm.ledger import Entry, Ledger

# For each wait the operation, and when the device began and ended to wait.
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
        """Bytes, into the ledger that it gives."""
        outer, self._ledger = self._ledger, Ledger()
        try:
            yield self._ledger
        finally:
            self._ledger = outer

    @contextmanager
    def timing(self) -> Iterator[CommTrace]:
        """Times, into the journal that it gives."""
        outer, self._journal = self._journal, CommTrace()
        try:
            yield self._journal
        finally:
            self._journal = outer

    @contextmanager
    def waiting(self) -> Iterator[Waits]:
        """Waits, into the list that it gives."""
        outer, self.waits = self.waits, []
        try:
            yield self.waits
        finally:
            self.waits = outer

    def start(self, operation: str, axis: str, ranks: int, size: int, origin: str) -> Transfer | None:
        """A communication starts. What it gives is to be told of the wait, if anything is given."""
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
        """What is in this ledger was done once more, by a recording."""
        if self._ledger is not None:
            self._ledger.entries += done.entries

    def wait(self, transfer: Transfer) -> None:
        """A rank begins to wait for it."""
        transfer.awaited = time.perf_counter()
        if self._journal is not None:
            self._journal.order.append(("wait", transfer))
