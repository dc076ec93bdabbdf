"""Values that must be the same on all ranks before gradients are computed of them.

A loss of the whole batch is one number on all ranks. It differs if ranks compute it from their own samples, or with numbers
of their own: then the average over ranks would be the gradient of no loss that the program wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.comm import devices
from cubeloom.comm.axis import Axis
from cubeloom.comm.batch.line import line
from cubeloom.comm.batch.parts import Parts


class BatchValue(Tensor):
    """A plain tensor, except that `backward` refuses a value that differs between the ranks of `axis`."""

    axis: Axis

    @staticmethod
    def of(value: Tensor, axis: Axis) -> Tensor:
        """The plain tensor, if it needs no gradient."""
        if type(value) is not Tensor or not value.requires_grad:
            return value
        with torch_private.without_subclasses():
            made: BatchValue = value.as_subclass(BatchValue)
        made.axis = axis
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, Parts) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        values = [each for each in torch_private.tree_leaves((args, kwargs)) if isinstance(each, BatchValue)]
        axis = max((each.axis for each in values), key=lambda each: each.size)
        if function is Tensor.backward or function is torch.autograd.grad:
            refuse_different(function, args, kwargs)
        if all(issubclass(kind, BatchValue) for kind in types):
            with torch_private.without_subclasses():
                found = function(*args, **kwargs)
        else:
            found = function(*torch_private.tree_map(plain, args), **torch_private.tree_map(plain, kwargs))
        return torch_private.tree_map(
            lambda each: BatchValue.of(each, axis) if isinstance(each, Tensor) else each, found
        )


def plain(value: Any) -> Any:
    """The same tensor, of torch's own class."""
    if not isinstance(value, BatchValue):
        return value
    with torch_private.without_subclasses():
        return value.as_subclass(Tensor)


def refuse_different(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Checks before a backward begins."""
    first = args[0] if args else kwargs.get("outputs", kwargs.get("self"))
    given = kwargs.get("gradient", args[1] if function is Tensor.backward and len(args) > 1 else None)
    for each in first if isinstance(first, list | tuple) else [first]:
        # With a gradient of the caller's own there is no loss to compare.
        if isinstance(each, BatchValue) and given is None and each.numel() == 1:
            _refuse_value(each)


def _refuse_value(value: BatchValue) -> None:
    """On a GPU the device asserts it, and the host does not wait."""
    with torch.no_grad():
        own = (
            plain(value).detach().reshape(()).float() if value.dtype.itemsize < 4 else plain(value).detach().reshape(())
        )
        most, least = value.axis.all_reduce(torch.stack([own, -own]), "loss of all ranks", largest=True).wait()
        digits = torch.finfo(value.dtype).eps ** 0.5
        alike = ~((most + least).abs() > digits * torch.maximum(most.abs(), least.abs()))
        here = line()
        words = (
            f"{here and here + ': '}the loss differs between ranks, so that its gradients would not be those of one loss. Pass"
            " all tensors of the batch through mesh.shard(batch), or through mesh.from_local(batch) if each rank loads its own"
            " samples; and use no number in the loss that a rank computed from its own samples alone"
        )
        if not devices.assert_all(alike, words):
            raise UserError(
                f"{words}. Here it is {own.item():.6g}, and over all ranks from {-least.item():.6g} to {most.item():.6g}"
            )
