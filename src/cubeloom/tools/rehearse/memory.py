"""The memory of tensors over time and by purpose: counts their storages, of fake tensors as of real ones.

    with Tracker() as tracker:
        build the model
        tracker.label("parameters", …)
        tracker.begin()                 # the peak counts from here on
        train
    memory = tracker.memory()

A storage counts from the operation that created it until its last reference is gone. Not counted: what an operation
allocates and frees inside, rounding by the allocator, and a network's own buffers. (gloo copies and splits its input in
this thread; a storage whose creation was not seen is not ours.)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cubeloom.base.torch_private import (
    TorchDispatchMode,
    device_of,
    in_backward,
    running_backward,
    storage_identity,
    tree_leaves,
)

Kind = Literal["parameters", "gradients", "optimizer", "activations", "buffers"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HOST: Literal["host"] = "host"
"""The label of tensors that stay in the host's memory, which count for no peak."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `at_peak`: what the peak consists of; `over_time`: the total after each operation's changes."""

    peak: int
    at_peak: dict[Kind, int]
    over_time: list[tuple[int, int]]  # (number of the operation, bytes)
    host: int = 0  # bytes in the host's memory, at the end

    def thinned(self, points: int = 200) -> list[tuple[int, int]]:
        """At most `points` points of `over_time`, each the largest of its interval."""
        stretch = -(-len(self.over_time) // points) or 1
        parts = (self.over_time[first : first + stretch] for first in range(0, len(self.over_time), stretch))
        return [max(part, key=lambda point: point[1]) for part in parts]


# The result of torch.tensor is first seen here, as an argument.
_FRESH = torch.ops.aten.lift_fresh.default


@dataclass
class _Storage:
    size: int
    born: int  # the operation that created it
    backward: int  # the newest backward that had started by then
    outside: bool  # whether it was created outside of any backward
    died: int | None = None
    outlived: bool = False  # whether a later backward started while it existed
    label: Kind | Literal["host"] | None = None

    @property
    def kind(self) -> Kind:
        """What is created outside of a backward and exists when one starts is kept for it; the rest is temporary."""
        if self.label is not None and self.label != HOST:
            return self.label
        return "activations" if self.outside and self.outlived else "buffers"


class Tracker(TorchDispatchMode):
    """Sees every operation of this thread and of its backwards."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[_Storage] = []
        self._alive: dict[int, tuple[_Storage, weakref.ref[torch.UntypedStorage]]] = {}  # by address
        self._now = 0
        self._begun = 0
        self._backward = -1  # the newest backward that has started; torch numbers them upwards

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it consists of local tensors, whose operations come here
        result = function(*arguments, **(named or {}))
        self._now += 1
        self._backward = max(self._backward, running_backward())
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and device_of(leaf).type != "meta":
                storage = leaf.untyped_storage()
                if storage_identity(storage) not in self._alive and (
                    function is _FRESH or not _shares(storage, arguments)
                ):
                    self._see(storage)
        return result

    def begin(self) -> None:
        """From here on the peak counts, including the existing tensors."""
        self._now += 1
        self._begun = self._now

    def label(self, kind: Kind | Literal["host"], tensors: Iterable[Tensor]) -> None:
        """Label the purpose of some tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            (self._containing(storage) or self._see(storage)).label = kind

    def memory(self) -> Memory:
        for storage, _ in self._alive.values():
            storage.outlived = self._backward > storage.backward
        changes: list[tuple[int, int, Kind]] = [(self._begun, 0, "buffers")]
        for storage in self._storages:
            if storage.label == HOST:
                continue
            changes.append((storage.born, storage.size, storage.kind))
            if storage.died is not None:
                changes.append((storage.died, -storage.size, storage.kind))
        # What is freed within an operation, or before the next, is freed after the operation's results were allocated.
        changes.sort(key=lambda change: (change[0], -change[1]))
        now: Counter[Kind] = Counter()
        total = peak = 0
        at_peak: Counter[Kind] = Counter()
        over_time: list[tuple[int, int]] = []
        for time, size, kind in changes:
            now[kind] += size
            total += size
            if over_time and over_time[-1][0] == time:
                over_time[-1] = (time, max(total, over_time[-1][1]))
            else:
                over_time.append((time, total))
            if time >= self._begun and total > peak:
                peak, at_peak = total, now.copy()
        host = sum(storage.size for storage, _ in self._alive.values() if storage.label == HOST)
        return Memory(peak, {kind: at_peak[kind] for kind in KINDS}, over_time, host)

    def _containing(self, storage: torch.UntypedStorage) -> _Storage | None:
        """The storage whose memory a new one shares: a gradient is a part of its bucket, as a storage of its own."""
        if storage_identity(storage) in self._alive or storage.device.type == "meta":
            return None
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for known, weak in self._alive.values():
            other = weak()
            if other is None or other.device != storage.device:
                continue
            if other.data_ptr() <= begin and end <= other.data_ptr() + other.nbytes():
                return known
        return None

    def _see(self, storage: torch.UntypedStorage) -> _Storage:
        address = storage_identity(storage)
        known = self._alive.get(address)
        if known is not None:
            return known[0]
        outside = not in_backward()
        new = _Storage(storage.nbytes(), self._now, self._backward, outside)
        self._storages.append(new)
        self._alive[address] = new, weakref.ref(storage, partial(self._gone, address))
        return new

    def _gone(self, address: int, _: object) -> None:
        storage, _ = self._alive.pop(address)
        storage.died = self._now
        self._backward = max(self._backward, running_backward())
        storage.outlived = self._backward > storage.backward


def _shares(storage: torch.UntypedStorage, arguments: tuple[Any, ...]) -> bool:
    """Whether it is the storage of an argument."""
    address = storage_identity(storage)
    return any(isinstance(each, Tensor) and storage_identity(each) == address for each in tree_leaves(arguments))
