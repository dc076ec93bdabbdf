"""Strands of one computation that take turns on one thread (Singh et al.: overdecomposition).

    loss = Weave(model, ways=2)(tokens=tokens, targets=targets)     # as model(...), in two strands
    loss.backward()                                                 # once, for all strands

A strand runs until it has to wait for a collective. Then it yields, and the next strand computes while the network
works. The order of turns is fixed, so all ranks start collectives in the same order.

Strands do not yield during the backward: autograd runs nodes in the reverse order of their creation, which is already
interleaved. This is enough for collectives of both passes. A collective that exists only in the backward has no pause
in the forward to mirror. Its wait node is delayed until after the other strand's next computation (`defer_wait`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from copy import copy
from functools import partial, wraps
from typing import Any, Protocol

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.autograd.graph import Node

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.base.limits import within
from cubeloom.comm import devices
from cubeloom.comm.batch import Parts
from cubeloom.parallel.weave.kept import KeptResults
from cubeloom.parallel.weave.thread_state import ThreadState


class InFlight(Protocol):
    """A collective that a strand has started."""

    def settle(self) -> None:
        """Await it and discard the result."""
        ...


# What strands agreed on in each running `recompute`, the outermost first.
Records = list[list[Tensor]]


class Strand(greenlet):
    def __init__(self, run: Callable[[], object], number: int, loom: Loom) -> None:
        super().__init__(run)
        self.number = number
        self.loom = loom
        self.records: Records = []
        self.keeping: list[KeptResults] = []


class Weave:
    """Calls a function as `ways` strands, each on a part of every tensor's first dimension, and joins the results.

    `stagger`: each strand starts one turn after the one before, for collectives that follow each other with little
    computation between them. A scalar result must be the same for all strands, like the results of `meet`.
    """

    def __init__(self, function: Callable[..., Any], ways: int = 1, stagger: bool = False) -> None:
        within("ways", ways)
        self._function = function
        self._ways = ways
        self._stagger = stagger

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._ways == 1:
            return self._function(*arguments, **named)
        parts = split((arguments, named), self._ways)
        loom = Loom(self._ways, self._stagger)
        return _join(loom.run([_call(self._function, *part) for part in parts]))


def run_in_strands(module: nn.Module, ways: int, stagger: bool) -> None:
    """From now on a forward of the module that makes a graph runs as so many strands."""
    within("ways", ways)
    kind = type(module)

    @wraps(kind.forward)
    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        plain = partial(kind.forward, self)
        return Weave(plain, ways if torch.is_grad_enabled() else 1, stagger)(*arguments, **named)

    if ways > 1:
        module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: function(*arguments, **named)


class Loom:
    """One run of some strands."""

    def __init__(self, ways: int, stagger: bool = False) -> None:
        self.ways = ways
        self.under_way: dict[int, InFlight] = {}  # collectives between start and finish, by identity
        self._stagger = stagger
        self._numbers: list[int] = []  # sequence numbers of delayed nodes, in the order of their creation
        self._meetings: list[dict[int, tuple[Tensor, ...]]] = []
        self._agreed: list[Tensor] = []
        self._met = [0] * ways

    def run(self, functions: list[Callable[[], Any]]) -> list[Any]:
        results: list[Any] = [None] * self.ways
        strands = [Strand(function, number, self) for number, function in enumerate(functions)]
        for strand in strands:
            strand.gr_context = copy_context()  # else it would find context variables as they are in a new process
        base = ThreadState.take()
        states = [base] * self.ways
        turn = 0
        try:
            while any(not strand.dead for strand in strands):
                for number, strand in enumerate(strands):
                    if strand.dead or (self._stagger and turn < number):
                        continue
                    states[number].put()
                    results[number] = strand.switch()
                    states[number] = ThreadState.take()
                turn += 1
        except BaseException:
            ThreadState.take()
            self._abandon(strands, states)
            raise
        finally:
            base.put()
        return results

    def _abandon(self, strands: list[Strand], states: list[ThreadState]) -> None:
        """End the remaining strands, and await the collectives that they started: all ranks have started them."""
        for strand, state in zip(strands, states, strict=True):
            if not strand.dead and strand:
                state.put()
                strand.throw(GreenletExit)
                ThreadState.take()
        for each in list(self.under_way.values()):
            each.settle()

    def meet(self, strand: Strand, then: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        place = self._met[strand.number]
        self._met[strand.number] += 1
        if place == len(self._meetings):
            self._meetings.append({})
        meeting = self._meetings[place]
        meeting[strand.number] = tensors
        if len(meeting) == self.ways:
            # In the order of the strands, whichever came last.
            self._agreed.append(then(*(sum(column[1:], start=column[0]) for column in _columns(meeting))))
            meeting.clear()
        while place >= len(self._agreed):
            pause()
        return self._agreed[place]

    def defer_wait(self, node: Node | None) -> None:
        """Give this wait node the sequence number of the previous delayed node.

        Of the nodes that are ready, autograd runs the one with the highest number. With the number of the other
        strand's last delayed node, this node waits only after that strand's computation up to there. A wrong number
        would cost time, never change values.
        """
        if node is None:  # nothing before it needs a gradient
            return
        self._numbers.append(torch_private.sequence_number(node))
        if len(self._numbers) > 1:
            torch_private.set_sequence_number(node, self._numbers[-2])


def strand() -> Strand | None:
    """The strand that is computing, if any."""
    here = getcurrent()
    return here if isinstance(here, Strand) else None


def pause() -> None:
    """Yield to the other strands. Does nothing without strands."""
    here = getcurrent()
    if isinstance(here, Strand):
        assert here.parent is not None
        here.parent.switch()


def meet(then: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`then` of the sums of all strands' tensors, computed once, as one tensor for all. Without strands, of the
    tensors.

    A recomputed forward of a strand runs alone, and gets what all strands agreed on the first time.
    """
    here = strand()
    if here is not None:
        agreed = here.loom.meet(here, then, tensors)
    elif _replays and (before := next(_replays[-1].agreed, None)) is not None:
        agreed = before.detach().requires_grad_(before.requires_grad)
    else:
        return then(*tensors)
    for record in _records():
        # without the graph, which refers to the record
        record.append(agreed.detach().requires_grad_(agreed.requires_grad))
    return agreed


def _columns(meeting: dict[int, tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(meeting[number] for number in sorted(meeting)), strict=True))


class Replay:
    """A recomputed forward of one strand: the strand, and what all strands agreed on in the first forward."""

    def __init__(self, place: tuple[int, int], agreed: list[Tensor], kept: KeptResults) -> None:
        self.place = place
        self.agreed = iter(agreed)
        self.kept = kept.again()
        self.records: Records = []
        self.keeping: list[KeptResults] = []


_replays: list[Replay] = []
_keeping: list[KeptResults] = []  # of forwards outside of a weave, the innermost last


def _records() -> Records:
    here = strand() or (_replays[-1] if _replays else None)
    return [] if here is None else here.records


def _keepers() -> list[KeptResults]:
    here = strand() or (_replays[-1] if _replays else None)
    return _keeping if here is None else here.keeping


@contextmanager
def recording(agreed: list[Tensor], kept: KeptResults) -> Iterator[None]:
    """Record what strands agree on in the forward inside, and the results that are to be kept."""
    records, keepers = _records(), _keepers()
    records.append(agreed)
    keepers.append(kept)
    try:
        yield
    finally:
        records.pop()
        keepers.pop()


def keep(layer: str, result: Tensor) -> None:
    """A layer has computed this: keep it if the block's recomputation is to take it."""
    for each in _keepers()[-1:]:
        each.add(layer, result)


def kept(layer: str) -> Tensor | None:
    """In a recomputation, the result that the layer computed in the first forward, if it was kept."""
    found = _replays[-1].kept.get(layer) if _replays else None
    return None if found is None else next(found)


@contextmanager
def replaying_as(place: tuple[int, int], agreed: list[Tensor], kept: KeptResults) -> Iterator[None]:
    """The forward inside is recomputed for the strand with this place."""
    _replays.append(Replay(place, agreed, kept))
    try:
        yield
    finally:
        _replays.pop()


def place() -> tuple[int, int]:
    """This strand's number and the number of strands."""
    here = strand()
    if here is not None:
        return here.number, here.loom.ways
    return _replays[-1].place if _replays else (0, 1)


def replaying() -> bool:
    """Whether a forward is being recomputed in a backward."""
    return bool(_replays)


def refuse_to_guess(layer: str, woven: bool) -> None:
    """Raise if torch's checkpoint recomputes a layer that strands have run: it does not say for which strand."""
    if woven and torch_private.in_backward() and not replaying():
        raise UserError(
            f"layer {layer}: a forward is computed once more, and nobody knows for which strand of the weave; use "
            "`cubeloom.parallel.weave.recompute` in place of torch's checkpoint"
        )


def split(tree: Any, ways: int) -> list[Any]:
    """This many trees, each with a part of every tensor. All get a tensor without dimensions."""
    if isinstance(tree, Tensor) and tree.dim():
        if (tree.part if isinstance(tree, Parts) else tree).shape[0] % ways:
            raise UserError(
                f"a tensor of shape {list(tree.shape)} cannot be cut into {ways} strands by its first dimension"
            )
        if isinstance(tree, Parts):
            return [tree.like(each, tree.cut) for each in tree.part.chunk(ways)]
        return list(tree.chunk(ways))
    if isinstance(tree, dict):
        parts = {key: split(value, ways) for key, value in tree.items()}
        return [{key: part[number] for key, part in parts.items()} for number in range(ways)]
    if isinstance(tree, list | tuple):
        columns = [split(value, ways) for value in tree]
        return [type(tree)(column[number] for column in columns) for number in range(ways)]
    return [tree] * ways


def _join(trees: list[Any]) -> Any:
    """The inverse of `_split`. A scalar must be the same for all strands: the same tensor or an equal one."""
    first = trees[0]
    if isinstance(first, Parts):
        return first.like(torch.cat([each.part for each in trees], first.cut), first.cut)
    if isinstance(first, Tensor):
        if first.dim() > 0:
            return torch.cat(trees)
        if not all(tree is first for tree in trees) and not _are_equal(trees):
            raise UserError(_APART.format([tree.item() for tree in trees]))
        return first
    if isinstance(first, dict):
        made = copy(first)  # the model's own kind of dictionary
        for key in first:
            made[key] = _join([tree[key] for tree in trees])
        return made
    if isinstance(first, list | tuple):
        return type(first)(_join(list(column)) for column in zip(*trees, strict=True))
    if isinstance(first, int | float) and any(tree != first for tree in trees):
        raise UserError(_APART.format(trees))
    # Of something else, such as a cache of keys and values, each strand has its own.
    return first if isinstance(first, int | float | str | bytes) or all(tree is first for tree in trees) else None


_APART = (
    "strands of a weave returned different numbers, {}, such as means over their own samples: which of them would be the whole"
    " is not known. Return a tensor with a number for each sample and take the mean outside, or use a loss that is cut"
    " (`Loss()`), or `weave.meet`"
)


def _are_equal(scalars: list[Tensor]) -> bool:
    """On a GPU the host does not wait: the device asserts it."""
    each = torch.stack([scalar.detach() for scalar in scalars])
    return devices.assert_all((each == each[0]) | (each.isnan() & each[0].isnan()), _APART.format("its losses"))
