"""Buckets of gradients that are reduced in one message.

All ranks send the same buckets in the same order, whichever parameters they used and whenever these became ready.
Parameters are put into buckets in the reverse order of their registration, roughly the order of a backward. A bucket is
sent once all of its parameters are ready and the buckets before it are sent. The rest is sent at the end of the
backward, with zeros for parameters that only other ranks used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cubeloom.comm import Axis, Pending
from cubeloom.parallel.arranged import Arranged
from cubeloom.parallel.parameter import local_of

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Reduction:
    """How a parameter's gradient is reduced: summed over `axis`, and divided by `ranks`, whose losses are averaged."""

    name: str
    axis: Axis
    ranks: int = 1
    arranged: Arranged | None = None  # if its rows are not those of the whole tensor

    @property
    def copies(self) -> Axis | None:
        """The ranks that have copies of some of its rows, and partial sums of their gradient."""
        return None if self.arranged is None else self.arranged.copies

    @property
    def alone(self) -> bool:
        """Whether the gradient is final as soon as this rank has computed it."""
        return self.axis.size == 1 and self.copies is None


@dataclass(frozen=True)
class Arrival:
    """The reduced gradient of some rows of this rank's block; copies of rows are not summed yet.

    It is a part of the block if each rank updates its own part (`scattered`).
    """

    parameter: nn.Parameter
    gradient: Tensor
    rows: slice
    scattered: bool = False


# Takes this rank's part of a parameter's gradient, instead of the whole (ZeRO-1).
Receiver = Callable[[nn.Parameter, Tensor], None]


@dataclass(frozen=True)
class _Alike:
    """The common properties of the parameters of a bucket."""

    axis: Axis
    ranks: int
    dtype: torch.dtype
    scattered: bool


@dataclass
class _Bucket:
    alike: _Alike
    parameters: list[nn.Parameter]
    pending: Pending | None = None


def sum_copies(arrivals: Iterable[Arrival], how: Mapping[nn.Parameter, Reduction]) -> None:
    """Sum the gradients of copied rows over the ranks that have copies, in one message per axis and dtype.

    All ranks of an axis have the same rows, in the same order and at the same places of their blocks.
    """
    alike: dict[tuple[Axis, torch.dtype], list[Tensor]] = {}
    for arrival in arrivals:
        arranged = how[arrival.parameter].arranged
        if arranged is not None and arranged.copies is not None:
            for part in arranged.copied(arrival.gradient, arrival.rows):
                alike.setdefault((arranged.copies, part.dtype), []).append(part)
    under_way = [
        (parts, axis.all_reduce_in_place(torch.cat([part.flatten() for part in parts]), "gradients of copies"))
        for (axis, _), parts in alike.items()
    ]
    for parts, pending in under_way:
        for part, summed in zip(parts, pending.wait().split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))


class Buckets:
    def __init__(
        self,
        reductions: dict[nn.Parameter, Reduction],
        dtype_of: Callable[[nn.Parameter], torch.dtype],
        limit: int,
    ) -> None:
        self.limit = limit  # bytes
        self.receiver: Receiver | None = None
        self.sent: set[nn.Parameter] = set()  # by the current backward
        self._reductions = reductions
        self._dtype_of = dtype_of
        self._ready: set[nn.Parameter] = set()
        self._rest: Iterator[_Bucket] | None = None  # the remaining buckets of a backward, in order
        self._next: _Bucket | None = None
        self._under_way: list[_Bucket] = []

    def divides(self, parameter: nn.Parameter) -> bool:
        """Whether each rank can get an equal part of the gradient."""
        axis = self._reductions[parameter].axis
        return axis.size > 1 and local_of(parameter).shape[0] % axis.size == 0

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Only these become ready, in about this order."""
        self._begin_anew()
        self._rest = iter(self._partition(parameters))
        self._next = next(self._rest, None)

    def ready(self, parameter: nn.Parameter, sums: dict[nn.Parameter, Tensor]) -> None:
        """The parameter's sum is complete: send the buckets that are now ready."""
        if self._rest is None:
            self.begin(reversed(self._reductions))
        self._ready.add(parameter)
        assert self._rest is not None
        while self._next is not None and self._ready.issuperset(self._next.parameters):
            self._send(self._next, sums)
            self._next = next(self._rest, None)

    def send_rest(self, used: Iterable[nn.Parameter], sums: dict[nn.Parameter, Tensor]) -> None:
        """The backward ends, and some rank used these parameters: send what `ready` has not sent."""
        used = set(used)
        rest = self._partition(reversed(self._reductions)) if self._rest is None else self._rest
        for bucket in ([] if self._next is None else [self._next]) + list(rest):
            # All parameters of a bucket that another rank has sent already are used.
            bucket.parameters = [each for each in bucket.parameters if each in used]
            if bucket.parameters:
                self._send(bucket, sums)
        self._begin_anew()

    def send(self, parameters: Iterable[nn.Parameter], sums: dict[nn.Parameter, Tensor]) -> None:
        """Send these, even if the bucket is not complete."""
        for bucket in self._partition(parameters):
            self._send(bucket, sums)

    def finish(self) -> Iterator[Arrival]:
        """Await all buckets."""
        under_way, self._under_way = self._under_way, []
        for bucket in under_way:
            assert bucket.pending is not None
            flat = bucket.pending.wait().flatten()
            if bucket.alike.ranks > 1:
                flat.mul_(1 / bucket.alike.ranks)
            axis, scattered = bucket.alike.axis, bucket.alike.scattered
            parts, place = (axis.size, axis.index) if scattered else (1, 0)
            sizes = [local_of(parameter).numel() // parts for parameter in bucket.parameters]
            for parameter, found in zip(bucket.parameters, flat.split(sizes), strict=True):
                length, *others = local_of(parameter).shape or (1,)
                length //= parts
                rows = slice(place * length, (place + 1) * length)
                shape = (length, *others) if parameter.dim() else ()
                yield Arrival(parameter, found.view(shape), rows, scattered)

    def abandon(self) -> None:
        """Wait for pending buckets and discard them."""
        for bucket in self._under_way:
            assert bucket.pending is not None
            bucket.pending.wait()
        self._under_way = []
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._rest = self._next = None
        self._ready, self.sent = set(), set()

    def _partition(self, parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
        filling: dict[_Alike, _Bucket] = {}
        sizes: dict[_Alike, int] = {}
        full = []
        for parameter in parameters:
            reduction = self._reductions[parameter]
            if reduction.axis.size == 1:
                continue
            scattered = self.receiver is not None and self.divides(parameter)
            dtype = self._dtype_of(parameter)
            alike = _Alike(reduction.axis, reduction.ranks, dtype, scattered)
            bucket = filling.setdefault(alike, _Bucket(alike, []))
            bucket.parameters.append(parameter)
            sizes[alike] = sizes.get(alike, 0) + local_of(parameter).numel() * dtype.itemsize
            if sizes[alike] >= self.limit:
                full.append(filling.pop(alike))
                del sizes[alike]
        return full + list(filling.values())

    def _send(self, bucket: _Bucket, sums: dict[nn.Parameter, Tensor]) -> None:
        axis, joined = bucket.alike.axis, self._join(bucket, sums)
        self.sent.update(bucket.parameters)
        if bucket.alike.scattered:
            bucket.pending = axis.reduce_scatter(joined, origin="gradients")
        else:
            bucket.pending = axis.all_reduce_in_place(joined, origin="gradients")
        self._under_way.append(bucket)

    def _join(self, bucket: _Bucket, sums: dict[nn.Parameter, Tensor]) -> Tensor:
        """All gradients of a bucket, flattened; or by rows, where row i is what rank i gets: its part of each gradient."""
        alike = bucket.alike
        found = (self._take(parameter, alike.dtype, sums) for parameter in bucket.parameters)
        shape = (alike.axis.size, -1) if alike.scattered else (-1,)
        flat = [each.reshape(shape) for each in found]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)

    def _take(self, parameter: nn.Parameter, dtype: torch.dtype, sums: dict[nn.Parameter, Tensor]) -> Tensor:
        if parameter in sums:
            return sums.pop(parameter)
        local = local_of(parameter)
        return torch.zeros(local.shape, dtype=dtype, device=local.device)
