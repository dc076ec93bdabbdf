"""A sharded weight that is all-gathered for use, and whose gradient is reduce-scattered.

The gather of the next layer's weight starts before it is needed: a `PrefetchOrder` records the order in which layers
use weights.

A gathered copy never outlives an update. A copy that is kept until the backward exists only in the graph, and any copy
is used only if the weight has not changed since it was gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Literal, Protocol

from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.comm import Axis, Pending
from cubeloom.parallel import weave
from cubeloom.parallel.config import Weights
from cubeloom.parallel.parameter import Version, local_of, version_of

Direction = Literal["forward", "backward"]


class PrefetchOrder:
    """The order in which the layers of one model use weights in a forward, learned from the previous one."""

    def __init__(self) -> None:
        self._order: list[tuple[str, Weight]] = []  # by layer, because two may share a weight
        self._needed: dict[str, bool] = {}  # whether the layer's backward needs the weight
        self._place = 0
        # layers that used sharded weights since ranks last compared, if they compare
        self._log: list[str] | None = None
        # Of recomputed forwards: the weight that was used after a layer's, in the forward or after the layer's backward.
        self._after: dict[tuple[str, Direction], Weight] = {}
        self._last: tuple[str, Direction] | None = None  # use of a weight in the running backward
        self._running = -1

    def forward(self, layer: str, weight: Weight, backward_needs_it: bool | None) -> None:
        """`weight` is being used: start to gather the one that followed it last time."""
        if self._log is not None:
            self._log.append(layer)
        if backward_needs_it is not None:
            self._needed[layer] = backward_needs_it
        use = (layer, weight)
        if self._place >= len(self._order) or self._order[self._place] != use:
            if use not in self._order:
                self._order.append(use)
            self._place = self._order.index(use)
        self._place += 1
        if self._place < len(self._order):
            self._order[self._place][1].prefetch("forward")

    def replay(self, layer: str, weight: Weight) -> None:
        """The same in a recomputed forward, with the weight that followed it last time."""
        if self._follows():
            assert self._last is not None
            self._after[self._last] = weight
        self._last = layer, "forward"
        if self._last in self._after:
            self._after[self._last].prefetch("backward")

    def _follows(self) -> bool:
        """Whether a weight was used before in the backward that is running."""
        before, self._running = self._running, torch_private.running_backward()
        return before == self._running and self._last is not None

    def backward(self, layer: str, weight: Weight) -> None:
        """The same in the backward, where the order is reversed, or the first weight of a recomputed block is next."""
        self._follows()
        self._last = layer, "backward"
        if self._last in self._after:
            self._after[self._last].prefetch("backward")
            return
        place = self._order.index((layer, weight))
        if place > 0:
            before, its_weight = self._order[place - 1]
            if self._needed.get(before):
                its_weight.prefetch("backward")

    def begin_log(self) -> None:
        """From now on record which layers use sharded weights, until `take_log`."""
        self._log = []

    def take_log(self) -> list[str]:
        """The layers that used sharded weights since the last call, in order."""
        assert self._log is not None
        log, self._log = self._log, []
        return log


class Rounding(Protocol):
    """Rounds a weight to fewer bytes before it is gathered or used. `version` changes when it would round differently."""

    @property
    def version(self) -> int | None: ...

    def rounded(self, shard: Tensor) -> tuple[Tensor, Tensor | None]:
        """The values, and their scale; the shard itself, without a scale, while there is none."""
        ...


class Weight:
    """A parameter whose first dimension is cut over `axis`, if it is sharded. Gathered, it is whole over that axis."""

    def __init__(
        self, parameter: nn.Parameter, axis: Axis, mode: Weights, prefetch_order: PrefetchOrder, origin: str
    ) -> None:
        self.parameter = parameter
        self.sharded = mode != "replicated" and axis.size > 1
        self.keeps = self.sharded and mode == "kept"  # the caller keeps the gathered copy until the backward
        self._axis = axis
        self._prefetch_order = prefetch_order
        self._origin = origin
        self._pending: Pending | None = None
        self._full: Tensor | None = None
        self._kept: weakref.ref[Tensor] | None = None
        self._gathered_from: tuple[Version, int | None] | None = None
        self.rounding: Rounding | None = None
        self.scale: Tensor | None = None  # of the values that were given last, if they are rounded
        self._reads = {"forward": 0, "backward": 0}  # by strands, of the copy that all of them read
        self._stays = False  # from a recomputed forward to the backward that follows it

    @property
    def parts(self) -> int:
        """The number of shards."""
        return self._axis.size if self.sharded else 1

    def __deepcopy__(self, memo: dict[int, object]) -> Weight:
        """For a copy of the model. A gathered copy is not copied."""
        made = copy(self)
        memo[id(self)] = made
        made.parameter, made._prefetch_order = deepcopy(self.parameter, memo), deepcopy(self._prefetch_order, memo)
        made._pending = made._full = made._kept = made._gathered_from = None
        made._reads, made._stays = {"forward": 0, "backward": 0}, False
        return made

    def forward(self, layer: str, backward_needs_it: bool | None) -> Tensor:
        """The whole weight, for a layer's forward; `read` must follow. Gathered once for all strands of a weave.

        `backward_needs_it` is None if no graph is created.
        """
        if not self.sharded:
            return self._values()
        if self._held is not None:
            return self._held  # another strand has gathered it
        full = self._gathered("forward")
        if torch_private.in_backward():
            self._stays = bool(backward_needs_it)
            self._prefetch_order.replay(layer, self)
        else:
            self._prefetch_order.forward(layer, self, backward_needs_it)
        return full

    def backward(self, layer: str) -> Tensor:
        """The whole weight, for an input gradient; `read` must follow."""
        if not self.sharded:
            return self._values()
        held = self._held
        if held is None or (self._stays and not self._reads["backward"]):
            held = self._gathered("backward")
            self._prefetch_order.backward(layer, self)
        return held

    @property
    def _held(self) -> Tensor | None:
        """The gathered weight, if it is up to date and not all strands have read it."""
        return self._full if self._gathered_from == self._version else None

    @property
    def _version(self) -> tuple[Version, int | None]:
        return version_of(self.parameter), None if self.rounding is None else self.rounding.version

    def _values(self) -> Tensor:
        """This rank's shard, as it is gathered and used."""
        shard = local_of(self.parameter)
        if self.rounding is None:
            return shard
        values, self.scale = self.rounding.rounded(shard)
        return values

    def read(self, direction: Direction, ways: int) -> None:
        """One of the strands has finished the computation for which it requested the whole weight."""
        if direction == "forward" and self._stays:
            return
        self._reads[direction] += 1
        strand = weave.strand()
        if self._reads[direction] < ways:
            if strand is not None:
                strand.loom.under_way[id(self)] = self
            return
        if strand is not None:
            strand.loom.under_way.pop(id(self), None)
        self._reads[direction] = 0
        self._full, self._stays = None, False

    def settle(self) -> None:
        """Discard a gathered copy that was not read: strands were abandoned, or the weight has changed."""
        self._reads = {"forward": 0, "backward": 0}
        if self._pending is not None:
            self._pending.wait()
        self._pending = self._full = None
        self._stays = False

    @property
    def scatter(self) -> Callable[[Tensor], Pending] | None:
        """Starts the reduce-scatter of the whole weight's gradient over the axis."""
        return self._scatter if self.sharded else None

    def _scatter(self, gradient: Tensor) -> Pending:
        return self._axis.reduce_scatter(gradient, 0, f"{self._origin} weight gradient")

    def prefetch(self, direction: Direction) -> None:
        """Start to gather, unless the current values are gathered already or being gathered."""
        now = self._version
        if self._gathered_from != now:
            self.settle()
            self._kept = None
        if self._full is None and self._kept is not None:
            self._full = self._kept()
        if self._pending is None and self._full is None:
            self._gathered_from = now
            self._pending = self._axis.all_gather(self._values(), 0, f"{self._origin} weight {direction}")

    def _gathered(self, direction: Direction) -> Tensor:
        self.prefetch(direction)
        if self._pending is not None:
            self._full, self._pending = self._pending.wait(), None
        assert self._full is not None
        self._kept = weakref.ref(self._full) if self.keeps else None
        return self._full
