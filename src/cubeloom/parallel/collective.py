"""Collectives inside autograd, each as two nodes: one that starts it and one that awaits it.

Code between the two nodes in the forward runs while the collective is in progress. Autograd runs nodes in the reverse
order of their creation, so the same holds in the backward for nodes created between them. A layer creates there the
nodes that do not depend on the result: the node of its weight gradient.

| kind    | forward        | backward       | for |
|---------|----------------|----------------|-----|
| gather  | all-gather     | reduce-scatter | an operand that is stored sharded |
| scatter | reduce-scatter | all-gather     | a result that is stored sharded |
| copy    | nothing        | all-reduce     | an operand that is stored replicated |
| reduce  | all-reduce     | nothing        | a result that is stored replicated |
| sum     | all-reduce     | all-reduce     | statistics that every rank uses |

In a weave a strand yields between the two nodes, and another one computes.

An all-gather may move a `Payload` instead of its tensor, such as its values rounded to FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cubeloom.comm import Axis, Network, Pending
from cubeloom.parallel import weave
from cubeloom.parallel.layout import Layout, redistribute

Kind = Literal["gather", "scatter", "copy", "reduce", "sum"]
_FORWARD = {"gather": "all_gather", "scatter": "reduce_scatter", "reduce": "all_reduce", "sum": "all_reduce"}
_BACKWARD = {"gather": "reduce_scatter", "scatter": "all_gather", "copy": "all_reduce", "sum": "all_reduce"}
_KINDS: dict[tuple[str | None, str | None], Kind] = {
    (_FORWARD.get(kind), _BACKWARD.get(kind)): kind for kind in ("gather", "scatter", "copy", "reduce", "sum")
}


@dataclass
class Payload:
    """What is moved and used instead of a tensor. Autograd sees a placeholder with the tensor's dtype."""

    make: Callable[[Tensor], Tensor]
    own: Tensor | None = None  # what was made of this rank's tensor, until `of`
    _arrived: Tensor | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """What was gathered; made of the tensor itself if nothing was."""
        arrived, self._arrived, self.own = self._arrived, None, None
        return self.make(tensor) if arrived is None else arrived

    def outgoing(self, tensor: Tensor) -> Tensor:
        self.own = self.make(tensor)
        return self.own

    def incoming(self, gathered: Tensor, like: Tensor) -> Tensor:
        """Keeps what was gathered; returns the placeholder."""
        self._arrived = gathered
        return like.new_zeros(()).expand(gathered.shape)


@dataclass(frozen=True)
class Collective:
    """The communication along an axis in both passes. `dim` is the tensor's dimension that is gathered or scattered.

    `inplace`: the caller owns the buffer, in both passes; the all-reduce may overwrite it.
    """

    kind: Kind
    axis: Axis
    origin: str
    dim: int = 0
    inplace: bool = False

    @classmethod
    def between(
        cls,
        layouts: tuple[Layout, Layout],
        network: Network,
        origin: str,
        dims: Mapping[str, int],
        inplace: bool = False,
    ) -> Collective:
        """The collective between two layouts. `dims`: the tensor's dimensions by their names in a layout."""
        source, target = layouts
        forward, backward = redistribute(source, target), redistribute(target.gradient, source.gradient)
        (move, *more) = forward or backward
        kind = _KINDS.get(tuple(each[0].operation if each else None for each in (forward, backward)))  # type: ignore[arg-type]
        if more or kind is None:
            raise ValueError(f"{origin}: no single collective leads from {source} to {target}")
        return cls(kind, network.axis(*move.axes), origin, dims[move.dim] if move.dim else 0, inplace)

    def start(self, tensor: Tensor, instead: Payload | None = None) -> Started:
        """Start the collective; `finish` returns the result. `instead`: what its all-gather moves, if it has one."""
        started = Started(self, instead)
        if self.axis.size == 1:
            started.token = tensor
            return started
        started.token = _Launch.apply(tensor, started)
        strand = weave.strand()
        if strand is not None:
            if started.pending is not None:
                strand.loom.under_way[id(started)] = started
            elif self.kind == "copy":
                strand.loom.defer_wait(started.token.grad_fn)
        return started

    def __call__(self, tensor: Tensor, instead: Payload | None = None) -> Tensor:
        return self.start(tensor, instead).finish()

    def forward(self, tensor: Tensor) -> Pending | None:
        return self._begin(_FORWARD.get(self.kind), tensor, "forward")

    def backward(self, gradient: Tensor) -> Pending | None:
        return self._begin(_BACKWARD.get(self.kind), gradient, "backward")

    @property
    def gathers_forward(self) -> bool:
        return self.kind == "gather"

    @property
    def gathers_backward(self) -> bool:
        return self.kind == "scatter"

    def again(self, shard: Tensor) -> Pending:
        """Gather again in the backward what the forward gathered and did not keep."""
        return self.axis.all_gather(shard, self.dim, f"{self.origin} again")

    def _begin(self, operation: str | None, tensor: Tensor, direction: str) -> Pending | None:
        origin = f"{self.origin} {direction}"
        match operation:
            case None:
                return None
            case "all_reduce":
                if self.inplace and tensor.is_contiguous():
                    return self.axis.all_reduce_in_place(tensor.detach(), origin)
                return self.axis.all_reduce(tensor, origin)
            case "all_gather":
                return self.axis.all_gather(tensor, self.dim, origin)
            case _:
                return self.axis.reduce_scatter(tensor, self.dim, origin)


class Started:
    """A collective between its two nodes."""

    def __init__(self, collective: Collective, instead: Payload | None = None) -> None:
        self.collective = collective
        self.instead_forward = instead if collective.gathers_forward else None
        self.instead_backward = instead if collective.gathers_backward else None
        self.token: Tensor | None = None
        self.pending: Pending | None = None

    def finish(self) -> Tensor:
        if self.pending is not None:
            weave.pause()
            strand = weave.strand()
            if strand is not None:
                del strand.loom.under_way[id(self)]
        # Drop the token: it holds its node, whose context holds this object, and the garbage collector does not see the
        # cycle.
        token, self.token = self.token, None
        assert token is not None
        return token if self.collective.axis.size == 1 else _Await.apply(token, self)

    def settle(self) -> None:
        """Await the collective of a strand that was abandoned, and discard the result."""
        pending, self.pending, self.token = self.pending, None, None
        if pending is not None:
            pending.wait()


def placeholder(like: Tensor) -> Tensor:
    """A tensor of this shape with one element of memory: it carries the graph, not values."""
    return like.new_zeros(()).expand(like.shape)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, started: Started) -> Tensor:
        ctx.started = started
        moved = tensor if started.instead_forward is None else started.instead_forward.outgoing(tensor)
        started.pending = started.collective.forward(moved)
        return tensor.view_as(tensor) if started.pending is None else placeholder(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        pending, ctx.started.pending = ctx.started.pending, None
        return _result(pending, gradient, ctx.started.instead_backward), None


def _result(pending: Pending | None, like: Tensor, instead: Payload | None) -> Tensor:
    if pending is None:
        return like
    return pending.wait() if instead is None else instead.incoming(pending.wait(), like)


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, started: Started) -> Tensor:
        ctx.started = started
        ctx.placeholder = placeholder(token)
        pending, started.pending = started.pending, None
        return token.view_as(token) if pending is None else _result(pending, token, started.instead_forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        instead = ctx.started.instead_backward
        moved = gradient if instead is None else instead.outgoing(gradient)
        ctx.started.pending = ctx.started.collective.backward(moved)
        return gradient if ctx.started.pending is None else ctx.placeholder, None
