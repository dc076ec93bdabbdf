"""A process group that carries nothing and writes down what is asked of it: one rank of a job of any size, alone.

    with rehearsed(rank=37, world=1024) as tape:
        network = Network(grid)         # as on a live job
        ...
    tape.events                         # what rank 37 asked for, and when it waited

Every communication is done at once. Nothing arrives: what a collective gives is what its buffer held, so that a sum is this
rank's summand. That does for tensors without values, and for the time that true ones take to compute.
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
    """Ranks that communicate; `copy` tells groups of the same ranks apart, by the order in which they were made."""

    ranks: tuple[int, ...]
    copy: int = 0


@dataclass(frozen=True)
class Call:
    """A communication that was started. All members of the group must agree on all but `splits`, `peer` and `origin`."""

    operation: str
    group: Group
    size: int  # bytes: of the whole tensor that the group gathers or sums, or of the message; of all_to_all 0
    dtype: str
    how: str = ""  # the sum or the largest; the place of the root in the group
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # elements to and from each member
    peer: int | None = None  # the rank that a message goes to or comes from
    origin: str = ""


@dataclass(frozen=True)
class Wait:
    """The wait for the communication at this place of the tape."""

    call: int


@dataclass
class Tape:
    """What one rank asked of the network, in its order. `ledger`, if one is being written, knows who asked."""

    events: list[Call | Wait] = field(default_factory=list)
    names: dict[str, tuple[int, ...]] = field(default_factory=dict)  # torch's of each group, and its ranks
    ledger: Ledger | None = None
    _copies: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _accounted: int = 0

    def group(self, name: str, ranks: tuple[int, ...]) -> Group:
        self.names[name] = ranks
        made = Group(ranks, self._copies[ranks])
        self._copies[ranks] += 1
        # gloo connects all members when a group is made: nobody goes on before all have come.
        self.events.append(Call(MAKE_GROUP, made, 0, ""))
        self.events.append(Wait(len(self.events) - 1))
        return made

    def origin(self) -> str:
        """Of the communication that is being started: the ledger's newest entry, which is written just before."""
        if self.ledger is None or len(self.ledger.entries) == self._accounted:
            return ""
        self._accounted = len(self.ledger.entries)
        return self.ledger.entries[-1].origin


class _Done(dist.Work):
    """Done, and notes that somebody waited for it."""

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
    """torch hands tensors to these methods as they are, fake ones too. 2.13 renamed some; the old names are 2.11's."""

    def __init__(self, options: Any, tape: Tape | None) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        # Only the first group, of all ranks, is given the tape; and it is not told its ranks.
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
    """Be this rank of a job of that size inside the block. `world.forget`, after one or several, leaves nothing of them."""
    if dist.is_initialized():
        raise UserError("this process is a rank of a job already; rehearse in a process of its own")
    tape = Tape()
    store = dist.HashStore()  # type: ignore[attr-defined] # documented; torch's types hide it
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world, pg_options=tape)
    try:
        yield tape
    finally:
        dist.destroy_process_group()
