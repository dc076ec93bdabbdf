"""What each rank of a job does in a step, timed on an emulated device: the true program, rehearsed, with its operators priced.

One rank of every place in the pipeline is run on tensors without values (`cubeloom.tools.rehearse`). Its communications, their
order and where it waits for each are the program's own; between them every operator that torch is asked for is given the
seconds that the device takes for it: a product by its three sizes, attention by its own, others by the bytes they touch.
Nothing here knows how a planner adds these up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cubeloom.comm import Network, world
from cubeloom.comm.recording_backend import Call, Tape, Wait, rehearsed
from cubeloom.plan import costs
from cubeloom.plan.cost_model.compute import optimizer
from cubeloom.plan.hardware import Cluster, Dtype
from cubeloom.tools.emulate.events import Await, Compute, Event, Line, Program, Start, joined
from cubeloom.tools.rehearse.boundaries import boundaries
from cubeloom.tools.rehearse.program import empty_values
from cubeloom.tools.rehearse.roles import line_of
from cubeloom.tools.rehearse.without_values import without_values
from cubeloom.tools.verify import Experiment
from cubeloom.tools.verify.live import Live, build

_SUMS = ("gradients", "parameters")  # of replicas: they have links of their own
_aten = torch.ops.aten
# These give a tensor of some shape, and read nothing.
_MADE = {
    "new_empty",
    "new_zeros",
    "new_empty_strided",
    "empty_like",
    "zeros_like",
    "ones_like",
    "_unsafe_view",
    "device",
}
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1}  # and which argument is the first factor
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 2,  # products of [length, head] and [head, length]
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 5,
}


def programs(experiment: Experiment, cluster: Cluster, dtype: Dtype) -> list[Program]:
    """By place in the pipeline."""
    assert experiment.schedule is not None
    grid = experiment.grid
    ranks = [grid.rank({"pipe": place, "data": 0, "z": 0, "y": 0, "x": 0}) for place in range(grid.pipe)]
    try:
        known = boundaries(experiment, experiment.schedule)
        return [_program(experiment, rank, known, cluster, dtype) for rank in ranks]
    finally:
        world.forget()


def _program(experiment: Experiment, rank: int, known: Any, cluster: Cluster, dtype: Dtype) -> Program:
    with rehearsed(rank, experiment.grid.world) as tape:
        network = Network(experiment.grid)
        with network.recording() as ledger, without_values():
            tape.ledger = ledger
            live = build(experiment, network, empty_values(experiment.dtype, network.device), known)
            with _Prices(tape, cluster, dtype) as prices:
                for number in range(2):  # weights are gathered ahead in an order that the first step learns
                    prices.begin()
                    _train(live, number, prices)
    tape.ledger = None
    return _Reader(experiment, rank, cluster).read(tape, prices)


def _train(live: Live, number: int, prices: _Prices) -> None:
    """A step and its update. The optimizer's operators are priced as one that reads and writes everything once."""
    data = live.data(number)
    cast(Any, live.step)(data, number, observer=prices)
    numbers = sum(part.tensor.numel() for part in live.optimizer.parts.values())
    prices.note(Compute(float(optimizer(numbers, live.experiment.dtype.itemsize, prices.cluster.device))))
    prices.free = True
    live.update()
    prices.free = False


@dataclass(frozen=True)
class _Mark:
    """An action begins, or ends where there is no name."""

    action: str = ""


@dataclass
class _Prices(TorchDispatchMode):
    """Notes what operators take, and where actions begin and end: each with how far the tape has come."""

    tape: Tape
    cluster: Cluster
    dtype: Dtype
    free: bool = False
    first: int = 0  # where the step begins on the tape
    noted: list[tuple[int, Compute | _Mark]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def begin(self) -> None:
        self.noted.clear()
        self.first = len(self.tape.events)

    def note(self, what: Compute | _Mark) -> None:
        self.noted.append((len(self.tape.events), what))

    def at(self, place: str) -> None:
        self.note(_Mark(place))

    def done(self, action: str) -> None:
        self.note(_Mark())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.free:
            seconds = self._seconds(func, args, result)
            if seconds:
                self.note(Compute(seconds))
        return result

    def _seconds(self, func: Any, args: Any, result: Any) -> float:
        device = self.cluster.device
        if func._opname in _PRODUCTS:
            left, right = args[_PRODUCTS[func._opname] :][:2]
            (m, k), n, count = left.shape[-2:], right.shape[-1], left.shape[:-2].numel()
            return float(costs.matmul(device, m, n, k, self.dtype, count))
        if func in _ATTENTION:
            query, key = args[:2] if _ATTENTION[func] == 2 else args[1:3]
            causal = args[4] if _ATTENTION[func] == 2 and len(args) > 4 else True
            sequences, head = query.shape[0] * query.shape[1], query.shape[-1]
            flops = 2.0 * query.shape[-2] * key.shape[-2] * head * sequences * (0.5 if causal else 1.0)
            return _ATTENTION[func] * flops / (device.peak(self.dtype) * device.matmul_fraction)
        read = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if not read or func._opname in _MADE or _is_view(func):
            return 0.0
        moved = sum(each.nbytes for each in [*read, *tree_leaves(result)] if isinstance(each, Tensor))
        return float(costs.memory_bound(device, moved))


def _is_view(func: Any) -> bool:
    returns = [each.alias_info for each in func._schema.returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)


class _Reader:
    """From a tape to a program: groups as lines of the grid, bytes as seconds on the emulated network."""

    def __init__(self, experiment: Experiment, rank: int, cluster: Cluster) -> None:
        self._grid = experiment.grid
        self._rank = rank
        self._cluster = cluster
        self._messages: set[int] = set()  # places of calls that the channels make by themselves

    def read(self, tape: Tape, prices: _Prices) -> Program:
        before: list[Event] = []
        after: list[Event] = []
        actions: dict[str, list[Event]] = {}
        messages: dict[str, float] = {}
        here, last = before, ""
        for what in _in_order(tape, prices):
            if isinstance(what, _Mark):
                here = actions.setdefault(what.action, []) if what.action else after
                last = what.action or last
            elif isinstance(what, tuple) and what[1].operation == "send":
                self._messages.add(what[0])
                messages[last] = messages.get(last, 0.0) + self._seconds(what[1])
            else:
                here += self._event(what)
        return Program(
            joined(before), {name: joined(events) for name, events in actions.items()}, joined(after), messages
        )

    def _event(self, what: Compute | Wait | tuple[int, Call]) -> Iterator[Event]:
        if isinstance(what, Compute):
            yield what
        elif isinstance(what, Wait):
            if what.call not in self._messages:
                yield Await(what.call)
        else:
            place, call = what
            if call.operation == "receive":
                self._messages.add(place)
                return
            line = line_of(self._grid, self._rank, call.group)
            link = "sums" if call.origin in _SUMS else "layers"
            yield Start(place, Line(line.axes, line.places), self._seconds(call), link)

    def _seconds(self, call: Call) -> float:
        """All ranks lie on one node, each as far from any other."""
        group = len(call.group.ranks)
        match call.operation:
            case "send" | "receive":
                return float(costs.send(self._cluster, call.size, group))
            case "all_reduce":
                return float(costs.all_reduce(self._cluster, call.size, group))
            case "all_gather" | "reduce_scatter":
                return float(costs.all_gather(self._cluster, call.size, group))
        raise ValueError(f"no emulated network carries {call.operation}")


def _in_order(tape: Tape, prices: _Prices) -> Iterator[Compute | _Mark | Wait | tuple[int, Call]]:
    """The last step: what the tape and the prices say, as it came."""
    noted = iter(prices.noted)
    place, what = next(noted, (len(tape.events), None))
    for number in range(prices.first, len(tape.events) + 1):
        while what is not None and place <= number:
            yield what
            place, what = next(noted, (len(tape.events), None))
        if number < len(tape.events):
            event = tape.events[number]
            yield event if isinstance(event, Wait) else (number, event)


def computed(program: Program) -> float:
    """Seconds that a rank's device computes in a step."""
    every: Sequence[Any] = (program.before, *program.actions.values(), program.after)
    return sum(event.seconds for events in every for event in events if isinstance(event, Compute))
