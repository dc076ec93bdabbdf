"""A stage whose actions are recorded once as CUDA graphs and then launched as a whole, so that the GPU never waits for
Python.

Python takes a millisecond to launch the kernels of a block. If they run no longer than that, the pipeline waits for
Python. A CUDA graph repeats recorded work on the same memory. Each portion in flight therefore has its own slot, with
memory for its inputs, activations and outputs, and gradients keep their addresses from step to step.

Collectives of the layers are part of a recording: each is started and awaited within one action, by all ranks of its
axis in the same order. The ledger counts them at every launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.comm import Ledger, Network
from cubeloom.parallel.fp8 import AmaxHistory
from cubeloom.parallel.gradients import Gradients
from cubeloom.parallel.parameter import like, local_of
from cubeloom.parallel.specs import DropoutSpec, LayerSpec
from cubeloom.pipeline import Schedule, Updates
from cubeloom.pipeline.runtime.stage import Carry, Data, Portion, Stage

Function = Callable[..., Carry]


def check_recordable(specs: Iterable[LayerSpec], schedule: Schedule, ways: int, recomputes: bool) -> None:
    """Raises UserError if a step does something that a recording cannot repeat."""
    reasons = {
        "dropout draws other numbers in every step": any(
            isinstance(spec, DropoutSpec) and spec.probability > 0 for spec in specs
        ),
        f"{schedule.name} keeps several versions of weights": schedule.updates is not Updates.FLUSH,
        f"strands take turns in Python (ways = {ways})": ways > 1,
        "what is recomputed is so by Python": recomputes,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"stages cannot be recorded: {reason}")


class Recording(Protocol):
    """Work that was recorded once and can be repeated with other values."""

    def __call__(self, *given: Mapping[str, Tensor]) -> Carry: ...


class Record(Protocol):
    """Creates recordings. Those of one `slot` are replayed in the order of their creation and share memory."""

    def __call__(self, function: Function, given: tuple[Carry, ...], slot: Hashable) -> Recording: ...


class GraphRecord:
    """Records CUDA graphs."""

    def __init__(self) -> None:
        self._pools: dict[Hashable, Any] = {}

    def __call__(self, function: Function, given: tuple[Carry, ...], slot: Hashable) -> Recording:
        pool = self._pools.setdefault(slot, torch.cuda.graph_pool_handle())
        still = tuple({name: tensor.clone() for name, tensor in each.items()} for each in given)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a communicator's watchdog, may continue meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            found = function(*still)
        return _Graph(graph, still, found)


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    given: tuple[Carry, ...]
    found: Carry

    def __call__(self, *given: Mapping[str, Tensor]) -> Carry:
        for still, values in zip(self.given, given, strict=True):
            for name, tensor in still.items():
                tensor.copy_(values[name])
        self.graph.replay()
        # The next portion in this slot overwrites the outputs, which may still be on their way to another rank.
        return {name: tensor.clone() for name, tensor in self.found.items()}


@dataclass(frozen=True)
class _Counted:
    """A recording whose collectives are added to the ledger at each launch."""

    recording: Recording
    network: Network
    collectives: Ledger

    def __call__(self, *given: Mapping[str, Tensor]) -> Carry:
        self.network.again(self.collectives)
        return self.recording(*given)


@dataclass
class _Slot:
    """The recordings of one portion in flight, by action: F, then B, or I and W."""

    recordings: dict[str, Recording]

    def do(self, name: str, *given: Carry) -> Carry:
        if name == "B" and name not in self.recordings:
            found = self.recordings["I"](*given)
            self.recordings["W"]()
            return found
        return self.recordings[name](*given)


@dataclass
class RecordedStage(Stage):
    """The first step runs unrecorded and shows which actions there are; `prepare` records them; later steps replay
    them. (With FP8 two steps run unrecorded.)
    """

    record: Record = field(default_factory=GraphRecord)
    home: Hashable = 0  # which of a worker's stages this is
    _examples: dict[str, tuple[Carry, ...]] = field(default_factory=dict)  # the arguments of each action
    _plain: dict[str, Any] = field(default_factory=dict)  # data other than tensors: the same in every step
    _most: int = 0  # the most portions in flight at once
    _free: list[_Slot] = field(default_factory=list)
    _taken: dict[Portion, _Slot] = field(default_factory=dict)

    def prepare(self) -> None:
        """Record the actions of the first step, once per portion that was in flight. Called between steps."""
        if self._most and not self._free:
            if "I" in self._examples:
                # If only some backwards are split, I and W replace the whole backward.
                self._examples.pop("B", None)
            self._free = [_Slot(self._record_slot(number)) for number in range(self._most)]
            self._examples.clear()

    def _record_slot(self, number: int) -> dict[str, Recording]:
        portion = -1 - number, None
        network, made = self.state.network, dict[str, Recording]()
        for name, given in self._examples.items():
            with network.recording() as ledger:
                recording = self.record(partial(self._do, name, portion), given, (self.home, number))
            made[name] = _Counted(recording, network, ledger)
        return made

    def _do(self, name: str, portion: Portion, *given: Carry) -> Carry:
        if name == "F":
            inputs, data, shares = given
            self.state.shares.update(shares)
            return super().forward(portion, inputs, {**self._plain, **data})
        if name == "W":
            super().weight_grad(portion)
            return {}
        return super().backward(portion, *given) if name == "B" else super().input_grad(portion, *given)

    def _act(self, name: str, portion: Portion, *given: Carry) -> Carry:
        slot = self._taken.get(portion)
        if slot is not None:
            return slot.do(name, *given)
        self._examples.setdefault(name, given)
        found = self._do(name, portion, *given)
        self._most = max(self._most, len(self._flights))
        return found

    def forward(self, portion: Portion, inputs: Carry, data: Data) -> Carry:
        if self._free:
            self._taken[portion] = self._free.pop()
        tensors = {name: each for name, each in data.items() if isinstance(each, Tensor)}
        self._plain = {name: each for name, each in data.items() if name not in tensors}
        return self._act("F", portion, inputs, tensors, dict(self.state.shares))

    def backward(self, portion: Portion, gradients: Carry) -> Carry:
        found = self._act("B", portion, gradients)
        self._release(portion)
        return found

    def input_grad(self, portion: Portion, gradients: Carry) -> Carry:
        return self._act("I", portion, gradients)

    def weight_grad(self, portion: Portion) -> None:
        self._act("W", portion)
        self._release(portion)

    def _release(self, portion: Portion) -> None:
        slot = self._taken.pop(portion, None)
        if slot is not None:
            self._free.append(slot)


class RecordedSteps:
    """A worker's stages, and the memory of their gradient sums, which is the same in every step.

    The sums are zeroed at the start of a step, and portions add to them. If the worker has one stage and a step has one
    portion, the recording writes the gradients itself, and nothing is added.

    `amax`: with FP8 recordings read the scales of each step where those of the first one are. Before the first step has
    ended there are none, so it is the second one that shows how later steps compute.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        parameters: Iterable[nn.Parameter],
        gradients: Gradients,
        amax: AmaxHistory | None,
        *,
        once: bool,
    ) -> None:
        self._stages = [stage for stage in stages if isinstance(stage, RecordedStage)]
        self._parameters = list(parameters)
        self._gradients = gradients
        self._once = once and len(self._stages) == 1
        self._unrecorded = 1  # steps that are left
        if amax is not None:
            amax.in_place = True
            self._unrecorded = 2
        self._sums: dict[nn.Parameter, Tensor] = {}

    def begin(self) -> None:
        """Called before a step's actions; records once no unrecorded steps are left."""
        self._unrecorded -= 1
        if self._unrecorded >= 0:
            return
        if self._unrecorded == -1:
            self._prepare()
        for parameter, total in self._sums.items():
            grad = parameter.grad
            if grad is not None and local_of(grad).data_ptr() == total.data_ptr():
                parameter.grad = like(parameter, local_of(grad).clone())  # this step overwrites it
        if not self._once:
            torch_private.zero(list(self._sums.values()))
        self._gradients.accumulate_in(self._sums)

    def _prepare(self) -> None:
        if not self._once:
            self._gradients.accumulate_in({each: self._zeros(each) for each in self._parameters})
        for stage in self._stages:
            stage.prepare()
        self._sums = self._gradients.sums()
        self._gradients.clear()

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        return torch.zeros_like(local_of(parameter), dtype=self._gradients.dtype_of(parameter))
