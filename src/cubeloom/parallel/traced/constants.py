"""A run of a model without values, except for tensors created from constants, whose values code may read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from math import prod
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base import torch_private
from cubeloom.base.operations import is_random, needs_values, operation_of
from cubeloom.parallel.check import where
from cubeloom.parallel.check.replay import RULES
from cubeloom.parallel.check.run import META, Function, Run, leaves
from cubeloom.parallel.cut import CutError, pattern_of
from cubeloom.parallel.traced.choices import Sliced
from cubeloom.parallel.traced.slices import with_argument

_MOST_NUMBERS = 2**24  # elements of a tensor that gets values
_HOST = torch.device("cpu")
_COMPARISONS = {"lt", "le", "gt", "ge"}
_ENDS_OF_UNIT = (0.0, 1.0 - 2**-24)  # of what `torch.rand` gives
_MAKERS = {
    "arange",
    "zeros",
    "ones",
    "full",
    "empty",
    "tensor",
    "rand",
    "eye",
    "linspace",
    "scalar_tensor",
    "as_tensor",
}


class RunWithConstants(Run):
    """Tensors created from constants, and the inputs, have values that code may read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.constants: dict[int, tuple[int, Tensor]] = {}  # by id, in the order of their creation
        self.twins: dict[int, Tensor] = {}  # from the id of a meta tensor to its tensor with values
        self.slices: Mapping[str, Sequence[Sliced]] = {}
        self.random: dict[int, str] = {}  # constants that each rank would draw for itself, and what draws them
        self.running: list[tuple[str, Any, dict[str, Any]]] = []  # modules whose code is running, with their arguments

    def constant(self, tensor: Tensor) -> None:
        self.constants[id(tensor)] = len(self.constants), tensor

    def known_constant(self, tensor: Tensor) -> tuple[str, int] | None:
        twin = self.twins.get(id(tensor))
        return None if twin is None or id(twin) not in self.constants else ("constant", self.constants[id(twin)][0])

    def __torch_function__(self, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or not self._is_constant(function, args, kwargs):
            if not self._paused and isinstance(function, FunctionType) and _is_composed(function):
                with self:
                    return torch_private.undispatched(function)(*args, **kwargs)
            return super().__torch_function__(function, types, args, kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _HOST}
        args = tuple(_HOST if isinstance(each, torch.device) else each for each in args)
        with _HOST:
            result = function(*args, **kwargs)
        if not isinstance(result, Tensor | tuple | list) and hasattr(result, "__next__"):
            result = list(result)
        made = list[Tensor]()
        leaves(result, made, [])
        for tensor in made:
            if id(tensor) not in self.constants:
                self.constant(tensor)
        self._note_random(function, args, kwargs, made)
        return result

    def _note_random(self, function: Function, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        """What depends on random numbers is random, but for comparisons that any number from 0 to 1 decides alike."""
        operation = operation_of(function)
        tensors = list[Tensor]()
        leaves((args, kwargs), tensors, [])
        drawn = [each for each in tensors if id(each) in self.random]
        if operation.metadata or not (drawn or is_random(operation, args, kwargs)):
            return
        name = self.random[id(drawn[0])] if drawn else operation.name
        if operation.name in _COMPARISONS and len(drawn) == 1:
            ends = [function(*torch_private.tree_map(_put(drawn[0], end), args), **kwargs) for end in _ENDS_OF_UNIT]
            if torch.equal(*ends):
                return
        if needs_values(operation, tensors):
            self.refuse_random(name)
        self.random.update((id(each), name) for each in made)

    def refuse_random(self, name: str) -> NoReturn:
        raise CutError(
            f"{where.here(self.names)}: {name} draws random numbers, and each rank would draw its own for its part: set the"
            " model's dropout to 0, or call model.eval() before it is parallelized"
        )

    def _is_constant(self, function: Function, args: Any, kwargs: Any) -> bool:
        tensors, numbers = list[Tensor](), list[Any]()
        leaves((args, kwargs), tensors, numbers)
        if tensors:
            return all(id(tensor) in self.constants for tensor in tensors)
        sizes = [number for number in numbers if isinstance(number, int) and not isinstance(number, bool)]
        return operation_of(function).name in _MAKERS and prod(max(1, abs(size)) for size in sizes) <= _MOST_NUMBERS

    def _on_meta(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        if id(value) in self.random:
            self.refuse_random(self.random[id(value)])
        known = id(value) in self.constants
        twin = torch.empty_like(value, device=META) if known else super()._on_meta(value)
        self.twins[id(twin)] = value
        self._alive.append(twin)
        return twin

    def run(self, inputs: Mapping[str, Any]) -> Any:
        with self._watching():
            return super().run(inputs)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Track which modules are running, with which arguments."""
        handles = []
        for name, module in self.model.named_modules():
            if name not in self.layers:
                handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.running.clear()

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        for each in self.slices.get(pattern_of(name), ()):
            args, kwargs = with_argument(args, kwargs, each.argument, partial(self.sliced, name, each))
        self.running.append((name, args, kwargs))
        return args, kwargs

    def _leave(self, *_: Any) -> None:
        self.running.pop()

    @abstractmethod
    def sliced(self, name: str, each: Sliced, whole: Tensor) -> Tensor:
        """An argument of which each rank takes its part. It has no values here, even if it is a constant."""

    @cached_property
    def _alive(self) -> list[Tensor]:
        return []

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of a parameter."""
        return self.owners.get(id(self.twins.get(id(tensor), tensor)))


def _put(tensor: Tensor, value: float) -> Callable[[Any], Any]:
    """In the place of this tensor one of this value everywhere."""
    return lambda each: torch.full_like(each, value) if each is tensor else each


def _is_composed(function: FunctionType) -> bool:
    """A function of torch that is written in Python, and has no rule of its own: what it calls is looked at."""
    name = operation_of(function).name
    ours = function.__module__ == functional.__name__ and name not in RULES
    return ours and "loss" not in name and "entropy" not in name
