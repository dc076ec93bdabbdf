"""Tensors of the whole batch of which each rank stores its samples. To a program they look as on one device.

Functions of one sample at a time run on the rank's own samples. Sums and means over samples, and losses, are summed over
ranks. For any other function the samples of all ranks are gathered. So a program and its gradients compute what they do on
one device. All ranks must run the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cubeloom.base import torch_private
from cubeloom.base.operations import Operation, is_random, operation_of
from cubeloom.comm.axis import Axis
from cubeloom.comm.batch import losses, numbers, shapes
from cubeloom.comm.batch.call import NOT_FOLLOWED, Call
from cubeloom.comm.batch.parts import Parts, refuse
from cubeloom.comm.batch.sums import own_samples
from cubeloom.comm.batch.value import BatchValue, plain, refuse_different

_RULES = {**numbers.RULES, **shapes.RULES, **losses.RULES}
_OF_THE_PART = ("requires_grad", "grad_fn", "is_leaf", "retain_grad", "retains_grad")
_WORDS = ("__repr__", "__str__", "__format__")
_operation = cache(operation_of)


class BatchTensor(Parts):
    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = _operation(function)
        call = Call(operation.name, function, tuple(args), kwargs or {})
        if function is torch.autograd.grad:
            return _grad(call)
        if operation.metadata or operation.name in ("get", "repr"):
            return _metadata(call)
        if operation.name in _SPECIAL:
            return _SPECIAL[operation.name](call)
        if call.kwargs.get("out") is not None:
            refuse(f"{call.name} takes", "with `out` it would write a part of its result")
        if operation.in_place:
            return _in_place(call)
        found = followed(call, operation)
        return of_all_samples(call) if found is NOT_FOLLOWED else found


def followed(call: Call, operation: Operation) -> Any:
    """The result computed from a rank's own samples, if there is a rule for it."""
    rule = _RULES.get(call.name)
    # Random numbers are drawn for the whole batch, as on one device.
    if rule is None or is_random(operation, call.args, call.kwargs):
        return NOT_FOLLOWED
    found = rule(call)
    return iter(found) if operation.iterates and found is not NOT_FOLLOWED else found


def of_all_samples(call: Call) -> Any:
    def gathered(value: Any) -> Any:
        return value.gathered() if isinstance(value, Parts) else plain(value)

    found = call.run(gathered)
    return torch_private.tree_map(lambda each: call.value(each) if isinstance(each, Tensor) else each, found)


def _metadata(call: Call) -> Any:
    tensor = call.first
    if isinstance(tensor, Parts) and call.name in _OF_THE_PART:
        return call.run(lambda each: each.part if isinstance(each, Parts) else each)
    if isinstance(tensor, Parts) and call.name == "grad":
        grad = tensor.part.grad
        return None if grad is None else tensor.like(grad / tensor.axis.size, tensor.cut)
    if isinstance(tensor, Parts) and call.name in _WORDS:  # without communication: one rank alone may print
        return f"{tensor.part} (this rank's samples of a batch of {list(tensor.sizes)})"
    with torch_private.without_subclasses():
        return call.function(*call.args, **call.kwargs)


def _in_place(call: Call) -> Any:
    tensor = call.first
    if not isinstance(tensor, Parts):
        return of_all_samples(call)
    if call.name == "setitem":
        if not shapes.assigned(call):
            refuse("an assignment changes", "not every rank can do its part of it by itself")
        return None
    alike = call.behind is not None or call.name in ("requires_grad", "detach")
    drawn = is_random(_operation(call.function), call.args, call.kwargs)
    if _RULES.get(call.name) is not numbers.pointwise or not alike or drawn:
        refuse(f"{call.name}_ changes", "not every rank can do its part of it by itself")
    call.run(call.aligned)
    return tensor.looking_again()


def _backward(call: Call) -> None:
    """With a gradient that the caller passes, as on one device."""
    tensor, gradient = call.first, call.argument(1, "gradient")
    if not isinstance(tensor, Parts) or gradient is None:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    own = _own_gradient(gradient, tensor)
    keep = call.argument(2, "retain_graph")
    tensor.part.backward(own, retain_graph=keep, create_graph=bool(call.argument(3, "create_graph", default=False)))


def _own_gradient(gradient: Tensor, tensor: Parts) -> Tensor:
    own = gradient.part if isinstance(gradient, Parts) else own_samples(gradient, tensor.axis, tensor.cut)
    return own * tensor.axis.size


def _grad(call: Call) -> Any:
    """`torch.autograd.grad`. On a rank gradients of samples are multiplied by the number of ranks: see `sums`."""
    refuse_different(call.function, call.args, call.kwargs)
    given = dict(zip(("outputs", "inputs", "grad_outputs"), call.args, strict=False)) | call.kwargs
    outputs, inputs = (
        list(each) if isinstance(each, tuple | list) else [each] for each in (given.pop("outputs"), given.pop("inputs"))
    )
    gradients = given.pop("grad_outputs", None)
    gradients = list(gradients) if isinstance(gradients, tuple | list) else [gradients] * len(outputs)
    own = [
        _own_gradient(gradient, each) if isinstance(each, Parts) and gradient is not None else gradient
        for each, gradient in zip(outputs, gradients, strict=True)
    ]
    parts = [[each.part if isinstance(each, Parts) else plain(each) for each in some] for some in (outputs, inputs)]
    found = torch.autograd.grad(parts[0], parts[1], grad_outputs=own, **given)
    return tuple(
        each.like(gradient / each.axis.size, each.cut) if isinstance(each, Parts) and gradient is not None else gradient
        for each, gradient in zip(inputs, found, strict=True)
    )


def _copy(call: Call) -> Any:
    tensor: Parts = call.first
    return tensor.like(deepcopy(tensor.part, call.argument(1, "memo", default={})), tensor.cut)


def _hook(call: Call) -> Any:
    return refuse("register_hook looks at the gradient of", "a rank has a part of it")


def _set_requires_grad(call: Call) -> None:
    call.first.part.requires_grad = call.argument(1, "value")


def _set_grad(call: Call) -> None:
    if call.argument(1, "value") is not None:
        refuse("an assignment changes the gradient of", "a rank has a part of it")
    call.first.part.grad = None


_SPECIAL: dict[str, Callable[[Call], Any]] = {
    "backward": _backward,
    "__deepcopy__": _copy,
    "register_hook": _hook,
    "requires_grad = ": _set_requires_grad,
    "grad = ": _set_grad,
    "data = ": lambda _: refuse("an assignment to `data` changes", "a rank has a part of it"),
}


def part_of(value: Any) -> Any:
    """What a model on this rank gets of it."""
    return value.part if isinstance(value, Parts) else plain(value)


def batch_tensor(part: Tensor, cut: int, axis: Axis) -> Tensor:
    """The part itself, if one rank has all samples."""
    return part if axis.size == 1 else BatchTensor.of(plain(part), cut, axis)


def gathered(value: Any) -> Any:
    return BatchValue.of(value.gathered(), value.axis) if isinstance(value, Parts) else value
