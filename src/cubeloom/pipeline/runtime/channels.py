"""Messages between workers: one channel per directed edge, several tensors per message, shapes known in advance."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch import Tensor

from cubeloom.comm import Axis, Network, Pending
from cubeloom.pipeline import Costs, Schedule
from cubeloom.pipeline.dependencies import Token
from cubeloom.pipeline.messages import Message, arrived, edges, programme
from cubeloom.pipeline.receiving import receiving_early, receiving_in_time
from cubeloom.pipeline.runtime.stage import Carry


@dataclass(frozen=True)
class Shape:
    """The shape and dtype of a receive buffer."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tuple(tensor.shape), tensor.dtype)


Boundary = dict[str, Shape]  # the tensors that one stage sends to the next


def as_text(boundary: Boundary) -> bytes:
    """The form in which it is sent: JSON, because nothing that comes from a network may be executed."""
    return json.dumps({name: [shape.size, str(shape.dtype)] for name, shape in boundary.items()}).encode()


def from_text(text: bytes) -> Boundary:
    known = json.loads(text)
    return {
        name: Shape(tuple(size), getattr(torch, dtype.removeprefix("torch."))) for name, (size, dtype) in known.items()
    }


_BEFORE = "before "


def together(boundary: Boundary, before: Boundary) -> Boundary:
    """The sent tensors, and the shapes of earlier stages' outputs, as one description."""
    return boundary | {f"{_BEFORE}{name}": shape for name, shape in before.items()}


def apart(told: Boundary) -> tuple[Boundary, Boundary]:
    handed = {name: shape for name, shape in told.items() if not name.startswith(_BEFORE)}
    return handed, {name.removeprefix(_BEFORE): shape for name, shape in told.items() if name not in handed}


class Channels:
    """The channels of a schedule's workers. `steps` is this worker's program, with receives placed for these channels.

    `costs`: which worker is ahead of which. `existing`: channels to reuse, of another schedule between the same
    workers.
    """

    def __init__(
        self, network: Network, schedule: Schedule, costs: Costs | None = None, existing: Channels | None = None
    ) -> None:
        here = network.coordinates["pipe"]
        whole = programme(schedule, costs)
        waits = network.waits_on_device
        self.steps = receiving_in_time(schedule, here, costs) if waits else receiving_early(whole[here])
        # All ranks create all channels, in one order.
        known = existing._channels if existing is not None else {}
        self._channels: dict[tuple[int, int], Axis] = {
            edge: known.get(edge) or network.edge(*edge) for edge in sorted(edges(whole))
        }
        self._device = network.device
        self._arriving: dict[Token, dict[str, Pending]] = {}
        self._leaving: dict[Token, list[Pending]] = {}
        self._arrived = arrived(whole, here)

    def send(self, message: Message, tensors: Carry) -> None:
        """Start sending. The buffer is freed when a message from the receiver shows its arrival, or after the step."""
        channel = self._channels[message.source, message.target]
        self._leaving[message.token] = [
            channel.send(tensors[name], to=1, origin=str(message)) for name in sorted(tensors)
        ]

    def receive(self, message: Message, boundary: Boundary) -> None:
        """Start receiving."""
        channel = self._channels[message.source, message.target]
        buffers = {
            name: torch.empty(shape.size, dtype=shape.dtype, device=self._device) for name, shape in boundary.items()
        }
        self._arriving[message.token] = {
            name: channel.receive(buffers[name], source=0, origin=str(message)) for name in sorted(buffers)
        }

    def take(self, token: Token) -> Carry:
        """Await a message."""
        found = {name: pending.wait() for name, pending in self._arriving.pop(token).items()}
        for sent in self._arrived[token]:
            self._let_go(sent)
        return found

    def _let_go(self, sent: Token) -> None:
        for pending in self._leaving.pop(sent, ()):
            pending.wait()

    def tell(self, edge: tuple[int, int], boundary: Boundary) -> None:
        """Send a description of shapes, before any message."""
        text = as_text(boundary)
        channel = self._channels[edge]
        channel.send(torch.tensor([len(text)], device=self._device), to=1, origin="boundary").wait()
        channel.send(torch.tensor(list(text), dtype=torch.uint8, device=self._device), to=1, origin="boundary").wait()

    def hear(self, edge: tuple[int, int], known: Boundary | None = None) -> Boundary:
        """Receive a description. `known` is its content in a rehearsal, whose network transfers nothing."""
        channel = self._channels[edge]
        length = channel.receive(torch.zeros(1, dtype=torch.int64, device=self._device), 0, "boundary").wait()
        size = int(length) if known is None else len(as_text(known))
        text = channel.receive(torch.zeros(size, dtype=torch.uint8, device=self._device), 0, "boundary").wait()
        return from_text(bytes(text.tolist())) if known is None else known

    def finish(self) -> None:
        """Await all pending sends."""
        for sent in list(self._leaving):
            self._let_go(sent)
