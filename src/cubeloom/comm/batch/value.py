"""A value of which every rank must have the same before it has a gradient.

What is computed of samples of the whole batch is one number on all ranks. It is not where ranks compute it of samples, or with
numbers, that each has of its own: then gradients would be the average of those of several losses.
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
    """A plain tensor but for its `backward`, which refuses what differs between the ranks of `axis`."""

    axis: Axis

    @staticmethod
    def of(value: Tensor, axis: Axis) -> Tensor:
        """Without a gradient it is the plain tensor."""
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
    """The tensor itself, of torch's own class."""
    if not isinstance(value, BatchValue):
        return value
    with torch_private.without_subclasses():
        return value.as_subclass(Tensor)


def refuse_different(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """What a backward begins with."""
    first = args[0] if args else kwargs.get("outputs", kwargs.get("self"))
    given = kwargs.get("gradient", args[1] if function is Tensor.backward and len(args) > 1 else None)
    for each in first if isinstance(first, list | tuple) else [first]:
        # Of what is no number the caller gives the gradient, and answers for it.
        if isinstance(each, BatchValue) and given is None and each.numel() == 1:
            _refuse_value(each)


def _refuse_value(value: BatchValue) -> None:
    """On a GPU the device asserts it, so that the host does not wait."""
    with torch.no_grad():
        own = (
            plain(value).detach().reshape(()).float() if value.dtype.itemsize < 4 else plain(value).detach().reshape(())
        )
        most, least = value.axis.all_reduce(torch.stack([own, -own]), "loss of all ranks", largest=True).wait()
        digits = torch.finfo(value.dtype).eps ** 0.5
        alike = ~((most + least).abs() > digits * torch.maximum(most.abs(), least.abs()))
        here = line()
        words = (
            f"{here and here + ': '}ranks have different losses, and gradients would be those of none of them. Give the model"
            " all tensors of the batch through mesh.shard(batch), or mesh.from_local(batch) where each rank loads samples of"
            " its own; and use in the loss no number that a rank counted in its own samples"
        )
        if not devices.assert_all(alike, words):
            raise UserError(
                f"{words}. Here it is {own.item():.6g}, and over all ranks from {-least.item():.6g} to {most.item():.6g}"
            )
