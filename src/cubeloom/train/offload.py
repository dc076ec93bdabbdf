"""Optimizer state and master weights in the host's memory: the update of a part brings its own to the device and back.

While a part is updated, the state of the next one is already being copied. At most two parts' state is on the device at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from cubeloom.comm import devices
from cubeloom.train.part import Part

_MASTER = "master"


class _Arriving(NamedTuple):
    """A part's state on its way to the device."""

    part: Part
    tensors: dict[str, Tensor]
    moment: Any


class Offload:
    """Updates parts one after another with the optimizer of all of them."""

    def __init__(self, optimizer: Optimizer, parts: list[Part]) -> None:
        self._optimizer = optimizer
        self._parts = parts
        self._copies = devices.Copies(parts[0].tensor.device if parts else torch.device("cpu"))
        for state in optimizer.state.values():
            for name, value in elements_of(state).items():  # made before the first step
                state[name] = devices.host_memory(value).copy_(value)

    @torch.no_grad()
    def step(self) -> None:
        """Update all parts that have a gradient, and publish them."""
        parts = [part for part in self._parts if part.tensor.grad is not None]
        groups = self._optimizer.param_groups
        group_of = {tensor: group for group in groups for tensor in group["params"]}
        coming = [self._load(part) for part in parts[:1]]
        try:
            for after in [*parts[1:], None]:
                if not coming:
                    break
                arrived = coming.pop()
                if after is not None:
                    coming.append(self._load(after))
                tensor = arrived.part.tensor
                self._optimizer.param_groups = [{**group_of[tensor], "params": [tensor]}]
                self._copies.wait(arrived.moment)
                self._update(arrived.part, arrived.tensors)
        finally:
            self._optimizer.param_groups = groups
        self._copies.join()

    def _load(self, part: Part) -> _Arriving:
        return _Arriving(part, *self._copies.load(self._kept(part, part.home)))

    def _kept(self, part: Part, master: Tensor | None) -> dict[str, Tensor]:
        state = elements_of(self._optimizer.state[part.tensor])
        return state if part.home is None or master is None else {**state, _MASTER: master}

    def _update(self, part: Part, brought: dict[str, Tensor]) -> None:
        homes, empty = self._kept(part, part.home), part.tensor.data
        state = self._optimizer.state[part.tensor]
        state.update((name, value) for name, value in brought.items() if name != _MASTER)
        part.tensor.data = brought.get(_MASTER, empty)
        self._optimizer.step()
        part.publish()
        updated = self._kept(part, part.tensor.data)  # an optimizer makes its state in its first step
        homes |= {name: devices.host_memory(value) for name, value in updated.items() if name not in homes}
        self._copies.store(updated, homes)
        state.update((name, value) for name, value in homes.items() if name != _MASTER)
        part.tensor.data = empty


def elements_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors with an element for each of the parameter's. Others, such as counts of updates, stay on the device."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim()}


def stepper(optimizer: Optimizer, parts: Iterable[Part], offload: bool) -> Callable[[], None]:
    """What updates and publishes the parts that have a gradient."""
    kept = list(parts)

    def step() -> None:
        optimizer.step()
        for part in kept:
            part.publish()

    return Offload(optimizer, kept).step if offload else step
