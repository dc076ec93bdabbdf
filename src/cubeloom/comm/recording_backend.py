"""A process group that transfers nothing and records every request: one rank of a job of any size, alone.

    with rehearsed(rank=37, world=1024) as tape:
        network = Network(grid)         # as in a live job
        ...
    tape.events                         # what rank 37 requested, and when it waited

Every communication completes at once. Nothing arrives: the result of a collective is what its buffer held, so a sum is
this rank's summand. This is enough for tensors without values, and for timing computation with real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.comm.devices import BACKENDS
from cubeloom.comm.ledger import Ledger

NAME = "cubeloom_rehearsal"
MAKE_GROUP = "make_group"


@dataclass(frozen=True)
class Group:
    """Ranks that communicate. `copy` distinguishes groups of the same ranks, in the order of their creation."""

    ranks: tuple[int, ...]
    copy: int = 0


@dataclass(frozen=True)
class Call:
    """A communication that was started. All members of the group must agree on all fields but `splits`, `peer`,
    `origin`.
    """

    operation: str
    group: Group
    size: int  # bytes of the whole tensor that the group gathers or reduces, or of the message; 0 for all_to_all
    dtype: str
    how: str = ""  # sum or maximum; the index of the root in the group
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # elements to and from each member
    peer: int | None = None  # the rank that a message goes to or comes from
    origin: str = ""


@dataclass(frozen=True)
class Wait:
    """The wait for the communication at this position of the tape."""

    call: int


@dataclass
class Tape:
    """The requests of one rank, in order. `ledger`, if one is recorded, knows the layer of each."""

    events: list[Call | Wait] = field(default_factory=list)
    names: dict[str, tuple[int, ...]] = field(default_factory=dict)  # torch's name of each group, and its ranks
    ledger: Ledger | None = None
    _copies: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _accounted: int = 0

    def group(self, name: str, ranks: tuple[int, ...]) -> Group:
        self.names[name] = ranks
        made = Group(ranks, self._copies[ranks])
        self._copies[ranks] += 1
        # gloo connects all members when a group is created: no rank continues before all have come.
        self.events.append(Call(MAKE_GROUP, made, 0, ""))
        self.events.append(Wait(len(self.events) - 1))
        return made

    def origin(self) -> str:
        """The origin of the communication being started: that of the ledger's newest entry, which is written just
        before.
        """
        if self.ledger is None or len(self.ledger.entries) == self._accounted:
            return ""
        self._accounted = len(self.ledger.entries)
        return self.ledger.entries[-1].origin


class _Done(dist.Work):
    """A completed communication that records when it is awaited."""

    def __init__(self, tape: Tape, call: int) -> None:
        super().__init__()
        self._tape = tape
        self._call = call

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._tape.events.append(Wait(self._call))
        return True

    def is_completed(self) -> bool:
        return True


class _RecordingGroup(dist.ProcessGroup):
    """torch passes tensors to these methods unchanged, including fake ones. 2.13 renamed some; 2.11 has the old names."""

    def __init__(self, options: Any, tape: Tape | None) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        # Only the first group, of all ranks, gets the tape, and torch does not tell it its ranks.
        self.tape: Tape = tape if tape is not None else dist.group.WORLD.tape  # type: ignore[union-attr]
        self._name = str(options.group_id)
        self._made = self.tape.group(self._name, tuple(options.global_ranks_in_group or range(options.group_size)))

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _start(self, operation: str, tensor: Tensor, **rest: Any) -> dist.Work:
        size = rest.pop("size", tensor.nbytes)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.tape.events.append(Call(operation, self._made, size, dtype, origin=self.tape.origin(), **rest))
        return _Done(self.tape, len(self.tape.events) - 1)

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        return self._start("all_reduce", tensors[0], how=_word(options.reduceOp))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._start("all_gather", output)

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, options: Any) -> dist.Work:
        return self._start("reduce_scatter", whole, how=_word(options.reduceOp))

    def all_to_all_single(  # type: ignore[override]
        self, incoming: Tensor, outgoing: Tensor, arriving: list[int], leaving: list[int], options: Any
    ) -> dist.Work:
        return self._start("all_to_all", outgoing, size=0, splits=(tuple(leaving), tuple(arriving)))

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        return self._start("broadcast", tensors[0], how=f"from {options.rootRank}")

    def reduce(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        return self._start("reduce", tensors[0], how=f"{_word(options.reduceOp)} at {options.rootRank}")

    def send(self, tensors: list[Tensor], target: int, tag: int) -> dist.Work:
        return self._start("send", tensors[0], peer=self._made.ranks[target])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        return self._start("receive", tensors[0], peer=self._made.ranks[source])

    def barrier(self, opts: Any) -> dist.Work:  # type: ignore[override]
        self.tape.events.append(Call("barrier", self._made, 0, ""))
        return _Done(self.tape, len(self.tape.events) - 1)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _word(operation: Any) -> str:
    """`sum` and the like; torch's own value prints as `<RedOpType.SUM: 0>`."""
    return str(getattr(operation, "op", operation)).rpartition(".")[2].partition(":")[0].lower()


dist.Backend.register_backend(NAME, _RecordingGroup, extended_api=True, devices=list(BACKENDS))


@contextmanager
def rehearsed(rank: int, world: int) -> Iterator[Tape]:
    """Act as this rank of a job of that size inside the block. Afterwards `world.forget` removes all traces of it."""
    if dist.is_initialized():
        raise UserError("this process is a rank of a job already; rehearse in a process of its own")
    tape = Tape()
    store = dist.HashStore()  # type: ignore[attr-defined] # documented; torch's types hide it
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world, pg_options=tape)
    try:
        yield tape
    finally:
        dist.destroy_process_group()
