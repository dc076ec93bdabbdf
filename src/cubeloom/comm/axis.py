"""Collectives along one axis of the grid. Each starts at once and is awaited where its result is needed.

Only this package calls torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.comm import devices
from cubeloom.comm.comm_trace import Transfer
from cubeloom.comm.devices import Instant
from cubeloom.comm.failure import failed
from cubeloom.comm.recorder import Recorder
from cubeloom.comm.watch import Watch

# torch 2.13 renamed these and warns about the old names; 2.11 has only the old ones.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX

CHANNEL_BYTES = 2**20  # the smallest size that gets its own channel


class Pending:
    """A communication in progress. `wait` returns its result and may be called once."""

    __slots__ = ("_about", "_axis", "_finish", "_keep", "_result", "_transfer", "_work")

    def __init__(
        self,
        result: Tensor,
        work: dist.Work | _Together | None = None,
        axis: Axis | None = None,
        about: tuple[str, ...] = (),
        transfer: Transfer | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
        keep: Tensor | None = None,
    ) -> None:
        self._result = result
        self._work = work
        self._axis = axis
        self._about = about  # its description in errors
        self._transfer = transfer
        self._finish = finish
        self._keep = keep  # the send buffer must outlive the transfer

    def wait(self) -> Tensor:
        if self._work is not None:
            assert self._axis is not None
            self._axis.wait(self._work, self._about, self._transfer)
        self._work = self._keep = None
        return self._result if self._finish is None else self._finish(self._result)


class _Together:
    """The parts of one collective, each on its own channel."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self, *limit: timedelta) -> None:
        for work in self._works:
            work.wait(*limit)


class Axis:
    """The ranks along one axis (or several, as one process group), seen from this rank.

    `name` is the ledger's name, for instance `x` or `data+z`; `index` is this rank's position among `size`. Tensors are
    local; `origin` tells the ledger which layer communicates. Large all-reduces, reduce-scatters and all-gathers are
    split over `groups`, which have the same ranks. Each group has its own connections and thread; one alone does not
    saturate a network of sockets.
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        index: int,
        groups: Sequence[dist.ProcessGroup],
        recorder: Recorder,
        limit: timedelta | Watch | None = None,
    ) -> None:
        self.name = name
        self.size = len(ranks)
        self.index = index
        self._ranks = ranks
        self._groups = groups
        self._group = groups[0] if groups else None
        self._recorder = recorder
        self._limit = limit  # on every wait if the host waits; otherwise `watch` looks after the stream
        self._words = f"over {name} with ranks {ranks}"
        # A process group orders its members by rank. Over several axes this can differ from the order of the axis.
        ordered = sorted(ranks)
        self._members = None if ranks == ordered else [ranks.index(rank) for rank in ordered]

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        """A copied model uses the same communicators."""
        return self

    @property
    def device(self) -> torch.device:
        """Where tensors must be that are communicated."""
        return self._recorder.device

    @property
    def alone(self) -> Axis:
        """This rank by itself."""
        return Axis(self.name, [self._ranks[self.index]], 0, (), self._recorder)

    def wait(self, work: dist.Work | _Together, about: tuple[str, ...], transfer: Transfer | None) -> None:
        if transfer is not None:
            self._recorder.wait(transfer)
        recording = devices.recording(
            self._recorder.device
        )  # a mark for the host's threads would be part of the recording
        waits = None if recording else self._recorder.waits
        begin = None if waits is None else Instant(self._recorder.device)
        try:
            if isinstance(self._limit, timedelta):
                work.wait(self._limit)
            else:
                work.wait()
        except RuntimeError as error:
            raise failed(" ".join(about), error) from error
        if isinstance(self._limit, Watch) and not recording:
            self._limit.waits(" ".join(about))
        if transfer is not None:
            transfer.finish()
        if waits is not None and begin is not None:
            waits.append((about[0], begin, Instant(self._recorder.device)))

    def _record(self, operation: str, size: int, origin: str) -> Transfer | None:
        return self._recorder.start(operation, self.name, self.size, size, origin)

    def _channels(self, tensor: Tensor) -> Sequence[dist.ProcessGroup]:
        """The groups over which a tensor is split: all if it is large enough and divides evenly, otherwise one."""
        if torch.compiler.is_compiling():
            # The compiler then leaves the layer to Python and traces the code between layers.
            raise UserError(
                "torch.compile cannot trace communication: call it on no model that was cut or parallelized; of our own models"
                " `apply(..., compile=True)`, or layout.compile in a settings file, compiles what lies between"
            )
        count = len(self._groups)
        enough = tensor.nbytes >= count * CHANNEL_BYTES
        return self._groups if enough and tensor.numel() % count == 0 and tensor.is_contiguous() else self._groups[:1]

    def _by_index(self, parts: Tensor) -> Tensor:
        """Parts in the order of the process group, reordered to that of the axis."""
        if self._members is None:
            return parts
        # Stacked and not indexed: torch would first copy a list of indices to the device, and the host would wait.
        return torch.stack([parts[self._members.index(index)] for index in range(self.size)])

    def _by_member(self, parts: Tensor) -> Tensor:
        """The inverse of `_by_index`."""
        return parts if self._members is None else torch.stack([parts[member] for member in self._members])

    def all_gather(self, shard: Tensor, dim: int = 0, origin: str = "") -> Pending:
        """Shards of all ranks, concatenated along `dim` in the order of the ranks."""
        if self.size == 1:
            return Pending(shard)
        dim %= shard.dim()
        shard = shard.contiguous()
        channels = self._channels(shard)
        whole = shard.new_empty((len(channels), self.size, shard.numel() // len(channels)))
        transfer = self._record("all_gather", whole.nbytes, origin)
        parts = shard.view(len(channels), -1)
        work = _Together(
            [
                _gather_single(whole[channel].flatten(), parts[channel], group=group, async_op=True)
                for channel, group in enumerate(channels)
            ]
        )

        def joined(found: Tensor) -> Tensor:
            by_rank = found.transpose(0, 1).reshape(self.size, *shard.shape)
            return self._by_index(by_rank).movedim(0, dim).flatten(dim, dim + 1)

        return Pending(whole, work, self, ("all_gather", origin, self._words), transfer, joined, keep=shard)

    def reduce_scatter(self, whole: Tensor, dim: int = 0, origin: str = "") -> Pending:
        """This rank's part, along `dim`, of the sum over the ranks."""
        if self.size == 1:
            return Pending(whole)
        # Parts must be contiguous: [.., size·n, ..] -> [size, .., n, ..].
        parts = self._by_member(whole.unflatten(dim, (self.size, -1)).movedim(dim % whole.dim(), 0)).contiguous()
        transfer = self._record("reduce_scatter", parts.nbytes, origin)
        part = torch.empty_like(parts[0])
        channels = self._channels(part)
        # [size, channels, elements of a channel] -> [channels, size, elements]
        cut = parts.view(self.size, len(channels), -1).transpose(0, 1).contiguous()
        pieces = part.view(len(channels), -1)
        work = _Together(
            [
                _scatter_single(pieces[channel], cut[channel].flatten(), group=group, async_op=True)
                for channel, group in enumerate(channels)
            ]
        )
        return Pending(part, work, self, ("reduce_scatter", origin, self._words), transfer, keep=cut)

    def all_reduce(self, tensor: Tensor, origin: str = "", *, largest: bool = False) -> Pending:
        """The sum over the ranks (or the maximum), in a new tensor."""
        if self.size == 1:
            return Pending(tensor)
        return self.all_reduce_in_place(tensor.clone(memory_format=torch.contiguous_format), origin, largest=largest)

    def all_reduce_in_place(self, tensor: Tensor, origin: str = "", *, largest: bool = False) -> Pending:
        if self.size == 1:
            return Pending(tensor)
        transfer = self._record("all_reduce", tensor.nbytes, origin)
        operation = _MAX if largest else _SUM
        channels = self._channels(tensor)
        parts = tensor.view(len(channels), -1) if len(channels) > 1 else [tensor]
        work = _Together(
            [
                dist.all_reduce(part, operation, group=group, async_op=True)
                for part, group in zip(parts, channels, strict=True)
            ]
        )
        return Pending(tensor, work, self, ("all_reduce", origin, self._words), transfer)

    def all_to_all(self, parts: list[Tensor], sizes: list[int], origin: str = "") -> Pending:
        """Send `parts[i]`, one-dimensional, to rank i; return what all ranks sent here, concatenated, of these `sizes`."""
        if self.size == 1:
            return Pending(parts[0])
        members = self._members or list(range(self.size))
        outgoing = torch.cat([parts[member] for member in members])
        incoming = outgoing.new_empty(sum(sizes))
        foreign = sum(sizes) - sizes[self.index]
        transfer = self._record("all_to_all", foreign * incoming.element_size(), origin)
        arriving = [sizes[member] for member in members]
        leaving = [parts[member].numel() for member in members]
        work = dist.all_to_all_single(incoming, outgoing, arriving, leaving, group=self._group, async_op=True)

        def in_order(joined: Tensor) -> Tensor:
            pieces = dict(zip(members, joined.split(arriving), strict=True))
            return torch.cat([pieces[index] for index in range(self.size)])

        finish = None if self._members is None else in_order
        return Pending(incoming, work, self, ("all_to_all", origin, self._words), transfer, finish, keep=outgoing)

    def broadcast(self, tensor: Tensor, root: int, origin: str = "") -> Pending:
        """Copy rank `root`'s tensor into the tensors of all ranks."""
        if self.size == 1:
            return Pending(tensor)
        transfer = self._record("broadcast", tensor.nbytes, origin)
        work = dist.broadcast(tensor, self._ranks[root], group=self._group, async_op=True)
        return Pending(tensor, work, self, ("broadcast", origin, self._words), transfer)

    def reduce(self, tensor: Tensor, root: int, origin: str = "") -> Pending:
        """The sum over the ranks, in rank `root`'s tensor. The other tensors are undefined afterwards."""
        if self.size == 1:
            return Pending(tensor)
        transfer = self._record("reduce", tensor.nbytes, origin)
        work = dist.reduce(tensor, self._ranks[root], group=self._group, async_op=True)
        return Pending(tensor, work, self, ("reduce", origin, self._words), transfer)

    def send(self, tensor: Tensor, to: int, origin: str = "") -> Pending:
        tensor = tensor.contiguous()
        transfer = self._record("send", tensor.nbytes, origin)
        about = ("send of", origin, f"to rank {self._ranks[to]}")
        return Pending(tensor, self._message(dist.isend, tensor, to, about), self, about, transfer)

    def receive(self, buffer: Tensor, source: int, origin: str = "") -> Pending:
        """Fill `buffer` with what rank `source` of the axis sends."""
        transfer = self._record("receive", buffer.nbytes, origin)
        about = ("receive of", origin, f"from rank {self._ranks[source]}")
        return Pending(buffer, self._message(dist.irecv, buffer, source, about), self, about, transfer)

    def _message(
        self, start: Callable[..., dist.Work | None], tensor: Tensor, partner: int, about: tuple[str, ...]
    ) -> dist.Work | None:
        """If the partner is gone, gloo raises here already; for a collective it raises in the wait."""
        try:
            return start(tensor, self._ranks[partner], group=self._group)
        except RuntimeError as error:
            raise failed(" ".join(about), error) from error
