"""A weight that rests sharded, gathered for use, its gradient scattered back.

The gather of the next layer's weight starts before it is needed: a `Chain` remembers in which order weights were used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from cubeloom import weave
from cubeloom.comm import Axis, Pending
from cubeloom.cube.cut import Weights
from cubeloom.cube.parameter import local_of

Direction = Literal["forward", "backward"]


class Chain:
    """The order in which one model uses its weights in a forward, learned from the last one."""

    def __init__(self) -> None:
        self._order: list[tuple[Weight, bool]] = []  # and whether that use needs the weight in the backward
        self._place = 0

    def forward(self, weight: Weight, backward_needs_it: bool) -> None:
        """`weight` is being used: start gathering the one that came after it last time."""
        use = (weight, backward_needs_it)
        if self._place >= len(self._order) or self._order[self._place] != use:
            if use not in self._order:
                self._order.append(use)
            self._place = self._order.index(use)
        self._place += 1
        if self._place < len(self._order):
            self._order[self._place][0].prefetch("forward")

    def backward(self, weight: Weight) -> None:
        """The same in the backward, where the one before comes next."""
        place = self._order.index((weight, True))
        if place > 0:
            before, needed = self._order[place - 1]
            if needed:
                before.prefetch("backward")


class Weight:
    """A parameter cut over `axis` in its first dimension, if it is sharded at all; gathered, it is whole over that axis."""

    def __init__(self, parameter: nn.Parameter, axis: Axis, mode: Weights, chain: Chain, origin: str) -> None:
        self.parameter = parameter
        self.sharded = mode != "replicated" and axis.size > 1
        self._axis = axis
        self._keep = mode == "kept"
        self._chain = chain
        self._origin = origin
        self._pending: Pending | None = None
        self._full: Tensor | None = None
        self._gathered_from = (-1, -1)  # version and address of the shard
        self._uses = 0  # forwards whose backward is to come
        self._reads = {"forward": 0, "backward": 0}  # by strands, of what all of them read

    @property
    def parts(self) -> int:
        """How many shards make the whole."""
        return self._axis.size if self.sharded else 1

    def forward(self, backward_needs_it: bool) -> Tensor:
        """The whole weight, for a forward; `read` must follow. Gathered once for all strands of a weave."""
        if not self.sharded:
            return local_of(self.parameter)
        full = self._gathered("forward")
        # A recomputation inside a backward runs one block forward: the next block's weights are not wanted then.
        if not _in_backward():
            self._chain.forward(self, backward_needs_it)
            self._uses += backward_needs_it and torch.is_grad_enabled()
        return full

    def backward(self) -> Tensor:
        """The whole weight, for an input gradient; `read` must follow."""
        if not self.sharded:
            return local_of(self.parameter)
        full = self._gathered("backward")
        self._chain.backward(self)
        self._uses -= 1
        return full

    def read(self, direction: Direction, ways: int) -> None:
        """The computation that asked for the whole weight is done with it: one of so many strands."""
        self._reads[direction] += 1
        strand = weave.strand()
        if self._reads[direction] < ways:
            if strand is not None:
                strand.loom.under_way[id(self)] = self
            return
        if strand is not None:
            strand.loom.under_way.pop(id(self), None)
        self._reads[direction] = 0
        if not (self._keep and self._uses > 0):
            self._full = None

    def settle(self) -> None:
        """Strands were given up before all had read."""
        self._reads = {"forward": 0, "backward": 0}
        self._uses = 0
        self._full = None

    @property
    def scatter(self) -> Callable[[Tensor], Pending] | None:
        """Takes the gradient of the whole weight on its way to be this rank's part of the sum over the axis."""
        return self._scatter if self.sharded else None

    def _scatter(self, gradient: Tensor) -> Pending:
        return self._axis.reduce_scatter(gradient, 0, f"{self._origin} weight gradient")

    def prefetch(self, direction: Direction) -> None:
        """Start gathering, unless that is done or under way for the values that the shard has now."""
        shard = local_of(self.parameter)
        # Updates raise the version; a pipeline that keeps old weights exchanges the shard itself.
        values = (shard._version, shard.data_ptr())
        if self._gathered_from != values:
            if self._pending is not None:
                self._pending.wait()
            self._pending = self._full = None
        if self._pending is None and self._full is None:
            self._gathered_from = values
            self._pending = self._axis.all_gather(shard, 0, f"{self._origin} weight {direction}")

    def _gathered(self, direction: Direction) -> Tensor:
        self.prefetch(direction)
        if self._pending is not None:
            self._full, self._pending = self._pending.wait(), None
        assert self._full is not None
        return self._full


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
