"""Runs a model on the meta device under a torch function mode that sees every function called between the layers."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError, first_line
from cubeloom.base.operations import Operation, operation_of
from cubeloom.parallel.check import functions, where
from cubeloom.parallel.cut import CutError

Function = Callable[..., Any]
META = torch.device("meta")


class Run(TorchFunctionMode, ABC):
    """`layers` are opaque: only their calls are seen."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        self.names = {id(module): name for name, module in model.named_modules()}
        self.owners = {id(each): name for name, each in model.named_parameters()}
        self._operations: dict[Function, Operation] = {}
        self.outside: dict[int, tuple[Tensor, Tensor]] = {}  # tensors from before the run, and their meta versions
        self._functions: set[Any] = set()  # autograd functions whose backward has run
        self._outputs: dict[int, Tensor] = {}  # outputs of the function whose backward is running, by address
        self._paused = False

    @abstractmethod
    def step(
        self,
        operation: Operation,
        function: Function,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        numbers: list[Any],
    ) -> Any:
        """Handles a call of a function."""

    @abstractmethod
    def layer(self, name: str, plain: Function, args: Any, kwargs: Any) -> Tensor:
        """Handles a call of a layer, and returns its output."""

    def __torch_function__(self, function: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return function(*args, **kwargs)
        operation = self._operations.get(function)
        if operation is None:
            operation = self._operations[function] = operation_of(function)
        if operation.metadata:
            return function(*args, **kwargs)
        if self._outputs:  # tensors of a backward may be saved outputs
            args, kwargs = torch_private.tree_map(self._saved_output, (args, kwargs))
        tensors, numbers = list[Tensor](), list[Any]()
        leaves((args, kwargs), tensors, numbers)
        if any(not tensor.is_meta for tensor in tensors):
            args, kwargs = torch_private.tree_map(self._on_meta, (args, kwargs))
            tensors, numbers = [], []
            leaves((args, kwargs), tensors, numbers)
        if where.in_assertion():
            return self._assumed(operation, function, args, kwargs)
        if any(functions.node_of(tensor) is not None for tensor in tensors):
            with self:  # a mode is off while it handles a call
                self.used(tensors)
        function, args, kwargs = _staying(operation, function, args, kwargs, tensors)
        return self.step(operation, function, args, kwargs, tensors, numbers)

    def _assumed(self, operation: Operation, function: Function, args: Any, kwargs: Any) -> Any:
        """An operation of an `assert`, which computes nothing of the result. It may ask for values: it holds."""
        if operation.name in _YES_OR_NO:
            return True
        if operation.name == "item":
            return _Anything()
        with self.paused():
            return function(*args, **kwargs)

    @abstractmethod
    def seen(self) -> Iterable[Tensor]:
        """All tensors of the run so far."""

    @abstractmethod
    def gradient_like(self, output: Tensor) -> Tensor:
        """The gradient of an autograd function's output."""

    @abstractmethod
    def same_as(self, output: Tensor, given: Tensor) -> None:
        """An autograd function returned its input, and torch created another tensor from it."""

    def used(self, tensors: Sequence[Tensor]) -> None:
        """Run the backward, once, of autograd functions whose results are used."""
        for tensor in tensors:
            node = functions.node_of(tensor)
            if node is not None and node not in self._functions:
                self._functions.add(node)
                with self.paused():
                    function = functions.function_of(node, tensor, self.seen())
                self.used([given for given in function.inputs if given is not None])
                self.function(function)

    def function(self, function: functions.Function) -> Sequence[Any]:
        """Returns the gradients of its inputs."""
        with self.paused():
            for output in function.outputs:
                for given in function.inputs:
                    if given is not None and given.shape == output.shape and functions.same_memory(given, output):
                        self.same_as(output, self._on_meta(given))
            gradients = list(map(self.gradient_like, function.outputs))
            self._outputs = {torch_private.storage_identity(output): output for output in function.outputs}
        try:
            with torch.no_grad():
                return function.gradients(gradients)
        except UserError:
            raise
        except Exception as error:
            text = f"the backward of {function.name} fails where it is run once without values: {first_line(error)}"
            self.refuse(text, error)
        finally:
            self._outputs = {}

    def _saved_output(self, value: Any) -> Any:
        """An output that a function saved for its backward is another tensor there, with the same memory."""
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        with self.paused():
            output = self._outputs.get(torch_private.storage_identity(value))
        return output if output is not None and output.shape == value.shape else value

    def _on_meta(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_meta:
            return value
        if id(value) not in self.outside:
            self.outside[id(value)] = value, torch.empty_like(value, device=META, requires_grad=value.requires_grad)
        return self.outside[id(value)][1]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls inside are not seen. Tensors that they create are still on the meta device."""
        before, self._paused = self._paused, True
        try:
            with META:
                yield
        finally:
            self._paused = before

    def refuse(self, text: str, cause: BaseException | None = None) -> NoReturn:
        place = where.here(self.names)
        raise CutError(f"{place}: {text}" if place else text) from cause

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """Run the model and return its result."""
        with ExitStack() as stack:
            stack.enter_context(_as_it_was(self.model))
            for name in self.layers:
                self._make_opaque(name)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(warnings.catch_warnings(action="ignore"))  # they are repeated in the real run
            stack.enter_context(self)
            try:
                return self.model(**inputs)
            except UserError:
                raise
            except Exception as error:
                self.failed(error)

    def failed(self, error: Exception) -> NoReturn:
        place = where.raised(error)
        raise CutError(
            f"{place and place + ': '}the model itself fails where it is run once without values: {type(error).__name__}:"
            f" {first_line(error)}"
        ) from error

    def _make_opaque(self, name: str) -> None:
        module = self.model.get_submodule(name)
        quick = isinstance(module, _OF_ONE_SHAPE)
        plain = partial(_like_its_input, module) if quick else _without_values(module).forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            tensors = list[Tensor]()
            leaves((args, kwargs), tensors, [])
            self.used(tensors)
            return self.layer(name, plain, args, kwargs)

        module.forward = forward


class _Anything:
    """A number without a value, of which every comparison is true."""

    def _true(self, _: object) -> bool:
        return True

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _true
    __hash__ = None  # type: ignore[assignment]


_YES_OR_NO = {"__bool__", "is_nonzero", "equal", "allclose"}
_ELSEWHERE = {torch.Tensor.cpu.__name__, torch.Tensor.cuda.__name__}
# The outputs of these have the shape of their inputs. torch needs half a millisecond to compute that on the meta
# device.
_OF_ONE_SHAPE = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, torch_private.AnyBatchNorm)


def _like_its_input(module: nn.Module, x: Tensor) -> Tensor:
    trained = x.requires_grad or any(each.requires_grad for each in module.parameters())
    y = torch.empty_like(x)
    return y.requires_grad_().clone() if trained else y  # no leaf: it may be changed in its place


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    found = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=META)
    return found.requires_grad_(any(each.requires_grad for each in (query, key, value)))


def _activation(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.clone()


_QUICK: dict[str, Function] = {
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("gelu", "silu", "softplus", "mish"), _activation),
}


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore what modules keep between calls: after the run it would be without values."""
    before: list[tuple[dict[str, Any], dict[str, Any]]]
    modules = list(model.modules())
    before = [(vars(module), dict(vars(module))) for module in modules]
    before += [(torch_private.buffers_of(module), dict(torch_private.buffers_of(module))) for module in modules]
    for module in modules:
        torch_private.take_off_backward_hooks(module)  # no backward follows
    try:
        yield
    finally:
        for attributes, old in before:
            attributes.clear()
            attributes.update(old)


def _without_values(module: nn.Module) -> nn.Module:
    """The module itself, if it is on the meta device."""
    own = [*module.parameters(), *module.buffers()]
    if all(tensor.is_meta and not isinstance(tensor, torch_private.FakeTensor) for tensor in own):
        return module
    known: dict[int, Any] = {}
    for tensor in own:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
        parameter = isinstance(tensor, nn.Parameter)
        known[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty
    return deepcopy(module, known)


_PLAIN = {int, bool, float, str, type(None)}  # most of what is no tensor


def leaves(value: Any, tensors: list[Tensor], numbers: list[Any]) -> None:
    """Collect tensors in order, and all other values in order."""
    if type(value) in _PLAIN:
        numbers.append(value)
    elif isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, tuple | list):
        for each in value:
            leaves(each, tensors, numbers)
    elif isinstance(value, dict):
        for key in value:
            leaves(value[key], tensors, numbers)
    else:
        numbers.append(value)


def _making(function: Function, *args: Any, **kwargs: Any) -> Any:
    # A separate mode, which costs time: only for functions that create tensors.
    with META:
        return function(*args, **kwargs)


def _staying(
    operation: Operation, function: Function, args: Any, kwargs: Any, tensors: list[Tensor]
) -> tuple[Function, Any, Any]:
    """Keep results on the meta device, wherever a function would put them."""
    name = operation.name
    if "device" in kwargs:
        kwargs = {**kwargs, "device": META}
    if name in _ELSEWHERE:
        return _alias, args[:1], {}
    if name == "to":
        args = tuple(META if isinstance(each, torch.device | str) else each for each in args)
    if operation.iterates:
        function = torch.unbind
    if not tensors:
        function = partial(_making, function)
    if not operation.in_place and not kwargs.get("inplace"):
        function = _QUICK.get(name, function)
    return function, args, kwargs


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def detached_results(result: Any, tensors: Sequence[Tensor], in_place: bool) -> Any:
    """If a function returns its own input, return another tensor with the same memory, so that each has its own layout."""
    if isinstance(result, Tensor):
        if not result.is_meta:
            return torch.empty_like(result, device=META)
        if not in_place and any(result is tensor for tensor in tensors):
            return result.view_as(result)
    return result
