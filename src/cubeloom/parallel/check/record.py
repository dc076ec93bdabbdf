"""The whole run: the operations of the serial model between its layers, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base.operations import Operation, is_random, needs_values, parameters_in
from cubeloom.parallel.check.functions import Function as AutogradFunction
from cubeloom.parallel.check.run import Function, Run, detached_results, leaves

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation, or one call of a layer. Tensors are identified by the entry that created them, or come from
    outside.
    """

    name: str
    inputs: tuple[Any, ...]
    input_shapes: tuple[Shape, ...]
    numbers: list[Any]
    shapes: list[Shape]
    dtype: torch.dtype | None = None  # of a layer's output
    needs_gradient: bool = False
    layer: str | None = None


@dataclass(frozen=True)
class Call:
    """One use of a layer, with the shapes of the serial model."""

    inputs: tuple[Shape, ...]
    output: Shape


class Record(Run):
    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        inputs: Mapping[str, Any],
        widths: Mapping[str, int] | None = None,
    ) -> None:
        """`widths`: of layers that have more output features over all ranks than the plain layer."""
        super().__init__(model, layers)
        self._widths = widths or {}
        self.entries: list[Entry] = []
        self.backwards: dict[int, int] = {}  # the first and last entry of each autograd function's backward
        self.kept: dict[
            int, tuple[Any, Tensor]
        ] = {}  # how each tensor is identified; kept alive, so that an id stays unique
        self.before: dict[int, tuple[Any, Tensor]] = {}  # tensors from before the run, even if they were changed
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                self.kept[id(value)] = ("input", name), value

    def known(self, tensor: Tensor) -> Any:
        if id(tensor) not in self.kept:
            self.kept[id(tensor)] = self.before[id(tensor)] = ("outside", id(tensor)), tensor
        return self.kept[id(tensor)][0]

    def step(
        self,
        operation: Operation,
        function: Function,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        numbers: list[Any],
    ) -> Any:
        self._refuse(operation, args, kwargs, tensors)
        result = detached_results(function(*args, **kwargs), tensors, operation.in_place)
        results = list[Tensor]()
        leaves(result, results, [])
        if operation.name == "setitem":
            results = tensors[:1]
        if not results and not tensors:
            return result
        self._note(operation.name, tensors, numbers, results)
        return iter(results) if operation.iterates else result

    def _note(self, name: str, tensors: list[Tensor], numbers: list[Any], results: list[Tensor], **more: Any) -> None:
        inputs = tuple(map(self.known, tensors))
        shapes = [tuple(result.shape) for result in results]
        given = tuple(tuple(tensor.shape) for tensor in tensors)
        for number, result in enumerate(results):
            self.kept[id(result)] = (len(self.entries), number), result
        self.entries.append(Entry(name, inputs, given, numbers, shapes, **more))

    def seen(self) -> Iterable[Tensor]:
        return [tensor for _, tensor in self.kept.values()]

    def function(self, function: AutogradFunction) -> Sequence[Any]:
        begin = len(self.entries)
        gradients = super().function(function)
        self.backwards[begin] = len(self.entries)
        return gradients

    def gradient_like(self, output: Tensor) -> Tensor:
        gradient = torch.empty_like(output, requires_grad=False)
        self.kept[id(gradient)] = ("gradient", self.known(output)), gradient
        return gradient

    def same_as(self, output: Tensor, given: Tensor) -> None:
        self.kept[id(output)] = self.known(given), output

    def _refuse(self, operation: Operation, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        name = operation.name
        if needs_values(operation, tensors):
            self.refuse(
                f"{name.strip('_')} asks for values of a tensor, which the model is checked without: what it computes may not"
                " depend on them"
            )
        if is_random(operation, args, kwargs):
            self.refuse(
                f"{name} draws random numbers, which would depend on the grid: each rank would draw its own. Of a residual"
                " stream nn.Dropout can be named in the cut: Dropout()"
            )
        for parameter in parameters_in(tensors):
            self.refuse(
                f"{name} uses {self.owners.get(id(parameter), 'a parameter')} outside of its layer, of which a rank has a part"
            )

    def layer(self, name: str, plain: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        tensors, numbers = list[Tensor](), list[Any]()
        leaves((args, kwargs), tensors, numbers)
        with self.paused():
            output = detached_results(plain(*args, **kwargs), tensors, in_place=False)
        if not isinstance(output, Tensor):
            self.refuse(f"layer {name} gives {type(output).__name__}, and only a tensor can be cut")
        if name in self._widths:
            with self.paused():
                wide = output.new_empty(*output.shape[:-1], self._widths[name])
                output = wide.requires_grad_(output.requires_grad)
        more = {"dtype": output.dtype, "needs_gradient": output.requires_grad, "layer": name}
        self._note(f"layer {name}", tensors, numbers, [output], **more)
        return output

    @property
    def calls(self) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {name: [] for name in self.layers}
        for entry in self.entries:
            if entry.layer is not None:
                found[entry.layer].append(Call(entry.input_shapes, entry.shapes[0]))
        return found


def calls_of(model: nn.Module, layers: Sequence[str], inputs: Mapping[str, Any]) -> dict[str, list[Call]]:
    """How each of these layers is called in a run of the serial model."""
    record = Record(model, layers, inputs)
    record.run(inputs)
    return record.calls
