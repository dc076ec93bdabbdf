"""Gradients of one model on one rank: accumulated by our own backward, summed over replicas behind it in buckets.

A layer's backward hands over a parameter's local gradient with `add`, or with `weight_gradient` how to get it. Autograd
tells through a hook when all uses of a parameter have been through; what its replicas must sum then goes into a bucket, and
full buckets are all-reduced while the backward goes on. When `backward()` returns, all gradients are whole.

Inside `accumulating()` the sum is left to a later pass, or to `reduce`. Inside `putting_off()` weight gradients are only
noted: `drain` computes them, `reduce` sums them (or `start_reduce` for some, and `finish_reduce` for all).
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from cubeloom.comm import Axis, Pending
from cubeloom.cube.parameter import like, local_of
from cubeloom.cube.products import add_to

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class WeightGradient:
    """How to get a parameter's gradient: its matmul, and the scatter of the result where a weight is sharded over z.

    The product is given what there is already, and adds to it. Of several strands of a weave the products are summed before
    they are scattered, once.
    """

    parameter: nn.Parameter
    layer: str  # two layers may share a weight
    product: Callable[[Tensor | None], Tensor]
    scatter: Callable[[Tensor], Pending] | None = None
    strands: int = 1


# Weight gradients that were put off.
Noted = deque[WeightGradient]
# Takes what this rank gets of a parameter's summed gradient, instead of the whole (see `scatter_to`).
Receiver = Callable[[nn.Parameter, Tensor], None]


class Gradients:
    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._buckets = _Buckets(bucket_bytes)
        self._axes: dict[nn.Parameter, Axis] = {}
        self._arriving: deque[tuple[nn.Parameter, Pending]] = deque()
        self._sums: dict[tuple[nn.Parameter, str], tuple[Tensor, int]] = {}  # over strands, and how many they are of
        self._owed: Counter[nn.Parameter] = Counter()  # gradients still arriving
        self._seen: set[nn.Parameter] = set()  # all uses have been through, but a gradient is owed
        self._noted: Noted | None = None  # where weight gradients are put off to
        self._accumulating = False
        self._backward = -1  # the running backward pass whose end we have asked to hear of
        self._summed: dict[nn.Parameter, weakref.ref[Tensor]] = {}  # gradients that hold an earlier pass's sum
        self._earlier: dict[nn.Parameter, Tensor] = {}

    def register(self, parameter: nn.Parameter, axis: Axis) -> None:
        """Replicas along this axis compute the parameter's gradient from different rows; they are to be summed."""
        self._axes[parameter] = axis
        if axis.size == 1:
            return  # there is no sum to begin when all uses have been through
        # Weak, since the garbage collector does not see through hooks: parameter -> hook -> gradients -> parameter.
        seen = weakref.WeakMethod(self._all_uses_seen)
        parameter.register_post_accumulate_grad_hook(lambda used: (seen() or _forget)(used))

    def scatter_to(self, receiver: Receiver) -> None:
        """From now on each rank that sums a gradient gets its part of the sum, where it can be cut (ZeRO-1)."""
        self._buckets.receiver = receiver

    def scatters(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient can be cut over the ranks that sum it."""
        return _divides(local_of(parameter), self._axes[parameter])

    def axis(self, parameter: nn.Parameter) -> Axis:
        """The ranks that sum the parameter's gradient."""
        return self._axes[parameter]

    def add_up_in(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Let the coming passes add the parameter's gradient to this tensor, if any, as if nothing had been summed before."""
        self._summed.pop(parameter, None)
        parameter.grad = gradient

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        outer, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = outer

    @contextmanager
    def putting_off(self) -> Iterator[Noted]:
        outer, self._noted = self._noted, deque()
        try:
            yield self._noted
        finally:
            self._noted = outer

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a local gradient to the parameter's, unless that is frozen."""
        if not parameter.requires_grad:
            return
        self._add(parameter, lambda into: add_to(into, gradient))

    def _add(self, parameter: nn.Parameter, product: Callable[[Tensor | None], Tensor]) -> None:
        self._hear_of_the_end()
        held = parameter.grad
        summed = self._summed.pop(parameter, None)
        if held is not None and summed is not None and summed() is held:
            # An earlier pass's sum must not be summed again: set aside until this pass's sum is there.
            self._earlier[parameter] = held
            held = None
        if held is None:
            parameter.grad = like(parameter, product(None))
        else:
            product(local_of(held))

    def weight_gradient(self, wanted: WeightGradient) -> None:
        """Compute a gradient now, or note it for `drain`; of a frozen parameter do neither."""
        if not wanted.parameter.requires_grad:
            return
        if self._noted is not None:
            self._noted.append(wanted)
            return
        self._hear_of_the_end()
        self._compute(wanted)

    @torch.no_grad()
    def drain(self, noted: Noted) -> None:
        """Compute weight gradients that were put off."""
        while noted:
            self._compute(noted.popleft())
        while self._arriving:
            self._arrive()

    def _compute(self, wanted: WeightGradient) -> None:
        if wanted.scatter is None:
            self._add(wanted.parameter, wanted.product)
            return
        key = (wanted.parameter, wanted.layer)
        earlier, strands = self._sums.pop(key, (None, 0))
        product = wanted.product(earlier)
        if strands + 1 < wanted.strands:
            self._sums[key] = product, strands + 1
            return
        self._owed[wanted.parameter] += 1
        self._arriving.append((wanted.parameter, wanted.scatter(product)))
        # One may still be scattering behind the next layer's computation.
        while len(self._arriving) > 1:
            self._arrive()

    def reduce(self) -> None:
        """Sum all gradients over their replicas."""
        self.start_reduce(self._axes)
        self.finish_reduce()

    def start_reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start to sum the gradients of these."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._buckets.put(parameter, self._axes[parameter])
        self._buckets.flush()

    def _arrive(self) -> None:
        parameter, pending = self._arriving.popleft()
        self.add(parameter, pending.wait())
        self._owed[parameter] -= 1
        if not self._owed[parameter] and parameter in self._seen:
            self._seen.discard(parameter)
            self._buckets.put(parameter, self._axes[parameter])

    def _all_uses_seen(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if self._accumulating or self._noted is not None:
            return
        if self._owed[parameter]:
            self._seen.add(parameter)
        elif parameter.grad is not None:
            self._buckets.put(parameter, self._axes[parameter])

    def _hear_of_the_end(self) -> None:
        """Have `_end` called when the backward that is running ends. Outside a backward there is nothing to hear of."""
        running = torch._C._current_graph_task_id()
        if running not in (-1, self._backward):
            self._backward = running
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._backward = -1
        while self._arriving:
            self._arrive()
        if not self._accumulating and self._noted is None:
            self.finish_reduce()

    def finish_reduce(self) -> None:
        """Await all sums that were started."""
        for parameter in self._buckets.finish():
            if parameter.grad is None:
                continue
            if parameter in self._earlier:
                local_of(parameter.grad).add_(local_of(self._earlier.pop(parameter)))
            self._summed[parameter] = weakref.ref(parameter.grad)


def _forget(_: Tensor) -> None:
    """The hook of a model that is gone."""


class _Buckets:
    """Gradients on their way to be summed, several in one message."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.receiver: Receiver | None = None  # takes parts of sums, if anybody does
        self._open: dict[tuple[Axis, torch.dtype, bool], list[nn.Parameter]] = {}
        self._under_way: list[tuple[list[nn.Parameter], Pending, int]] = []  # and how many parts a sum was cut into

    def put(self, parameter: nn.Parameter, axis: Axis) -> None:
        if axis.size == 1:
            return
        local = local_of(_gradient(parameter))
        scattered = self.receiver is not None and _divides(local, axis)
        bucket = self._open.setdefault((axis, local.dtype, scattered), [])
        bucket.append(parameter)
        if sum(local_of(_gradient(each)).nbytes for each in bucket) >= self._limit:
            self._send(axis, self._open.pop((axis, local.dtype, scattered)), scattered)

    def _send(self, axis: Axis, parameters: list[nn.Parameter], scattered: bool) -> None:
        locals_ = [local_of(_gradient(parameter)) for parameter in parameters]
        if scattered:  # row i is what rank i gets: its part of each gradient
            rows = torch.cat([local.reshape(axis.size, -1) for local in locals_], dim=1)
            pending = axis.reduce_scatter(rows, origin="gradients")
        else:
            pending = axis.all_reduce_in_place(torch.cat([local.flatten() for local in locals_]), origin="gradients")
        self._under_way.append((parameters, pending, axis.size if scattered else 1))

    def flush(self) -> None:
        """Send what is left."""
        for (axis, _, scattered), parameters in self._open.items():
            self._send(axis, parameters, scattered)
        self._open.clear()

    def finish(self) -> list[nn.Parameter]:
        """Send what is left, await all; the parameters whose gradients were summed."""
        self.flush()
        done: list[nn.Parameter] = []
        for parameters, pending, parts in self._under_way:
            sizes = [local_of(_gradient(parameter)).numel() // parts for parameter in parameters]
            for parameter, summed in zip(parameters, pending.wait().flatten().split(sizes), strict=True):
                self._deliver(parameter, summed, parts > 1)
            done += parameters
        self._under_way.clear()
        return done

    def _deliver(self, parameter: nn.Parameter, summed: Tensor, scattered: bool) -> None:
        if scattered and self.receiver is not None:
            self.receiver(parameter, summed)
        else:
            local = local_of(_gradient(parameter))
            local.copy_(summed.view_as(local))


def _divides(local: Tensor, axis: Axis) -> bool:
    return axis.size > 1 and local.shape[0] % axis.size == 0


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
