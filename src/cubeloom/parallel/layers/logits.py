"""Logits with classes cut over an axis that appear whole. They are all-gathered only if an operation needs them whole.

A cross-entropy, inside or outside of the model, uses the parts, as `layers.loss` does. Operations that only rearrange
rows or change the dtype keep the parts. Any other operation gathers them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cubeloom.base import torch_private
from cubeloom.base.operations import operation_of
from cubeloom.comm import Axis, Network
from cubeloom.comm.batch import BatchValue, Mean
from cubeloom.parallel import weave
from cubeloom.parallel.layers.alike import all_parts_of
from cubeloom.parallel.layers.classes import Classes
from cubeloom.parallel.layers.head_rows import Steps
from cubeloom.parallel.layers.indices import check_indices
from cubeloom.parallel.layers.loss import VocabularyCrossEntropy

_SAME = {"float", "double", "half", "bfloat16", "contiguous", "clone", "type_as"}
_VIEWS = {"view", "reshape"}


class CutLogits(Tensor):
    """Appears as `[…, N]`; `part` is this rank's `[…, N/axis]`."""

    part: Tensor
    network: Network
    axis: Axis
    classes: Classes
    origin: str
    checked: Axis | None = None  # ranks that must have the same loss of it, as of a `BatchValue`

    @staticmethod
    def of(part: Tensor, network: Network, axis: Axis, classes: Classes, origin: str) -> CutLogits:
        # No memory and no graph of its own: shape, dtype and device are those of the whole.
        with torch_private.real_tensors():  # a rehearsal's tensors have their own class
            looks = torch.empty((), dtype=part.dtype, device=part.device).expand(*part.shape[:-1], classes.count)
            made: CutLogits = looks.as_subclass(CutLogits)
        made.part, made.network, made.axis, made.classes, made.origin = part, network, axis, classes, origin
        return made

    def arranged(self, part: Tensor) -> CutLogits:
        """The same classes of other rows, or in another dtype."""
        made = CutLogits.of(part, self.network, self.axis, self.classes, self.origin)
        made.checked = self.checked
        return made

    def whole(self) -> Tensor:
        """All-gathered. In the backward each rank takes its own classes."""
        padding = self.classes.part - self.part.shape[-1]
        part = functional.pad(self.part, (0, padding)) if padding else self.part
        return all_parts_of(part, self.axis, -1, f"{self.origin} leave").narrow(-1, 0, self.classes.count)

    def take_all_classes(self) -> None:
        """For who changes it in its place: from now on this rank has all classes."""
        self.part, self.axis = self.whole(), self.axis.alone
        self.classes = Classes.even(self.classes.count, self.axis)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "").strip("_")
        first = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first, CutLogits):
            if name in ("get", "repr", "str", "size", "dim", "numel", "stride", "is_floating_point", "len"):
                if name == "get" and getattr(function, "__self__", None) is Tensor.requires_grad:
                    return first.part.requires_grad
                with torch_private.without_subclasses():
                    return function(*args, **kwargs)
            if operation_of(function).in_place:
                first.take_all_classes()
                function(first.part, *_wholes(args[1:]), **_wholes(kwargs))
                return first
            found = _arranged(name, function, first, args[1:], kwargs)
            if found is not None:
                return found
            if function is functional.cross_entropy:
                loss = cut_cross_entropy(*args, **kwargs)
                if loss is not None:
                    return loss
        if function is torch.cat and (joined := _joined_rows(*args, **kwargs)) is not None:
            return joined
        return _checked(function(*_wholes(args), **_wholes(kwargs)), (args, kwargs))


def _checked(found: Any, given: Any) -> Any:
    axes = [each.checked for each in torch_private.tree_leaves(given) if isinstance(each, CutLogits)]
    axis = next((each for each in axes if each is not None), None)
    if axis is None:
        return found
    return torch_private.tree_map(lambda each: BatchValue.of(each, axis) if isinstance(each, Tensor) else each, found)


def _joined_rows(tensors: Sequence[Tensor], dim: int = 0) -> CutLogits | None:
    """Of logits with the same classes, as the strands of a weave have them."""
    some = [each for each in tensors if isinstance(each, CutLogits)]
    if len(some) < len(tensors) or dim % some[0].dim() == some[0].dim() - 1:
        return None
    return some[0].arranged(torch.cat([each.part for each in some], dim))


def _arranged(
    name: str, function: Callable[..., Any], logits: CutLogits, rest: Sequence[Any], kwargs: dict[str, Any]
) -> CutLogits | None:
    """The operation applied to the part, if it leaves the classes in place."""
    count = logits.classes.count
    part = logits.part
    if name in _SAME or (name == "to" and not any(isinstance(each, torch.device) for each in rest)):
        changed = function(part, *_wholes(rest), **kwargs)
    elif name in _VIEWS:
        sizes = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple) else tuple(rest)
        if not sizes or not isinstance(sizes[-1], int) or sizes[-1] not in (count, -1):
            return None
        looks = torch.empty(logits.shape, device="meta").view(sizes)
        if looks.shape[-1] != count:
            return None
        changed = part.reshape(*looks.shape[:-1], part.shape[-1])
    elif name == "getitem":
        if looks_changed(logits.shape, rest[0]):
            return None
        changed = part[rest[0]]
    elif name == "flatten":
        looks = torch.empty(logits.shape, device="meta").flatten(*rest, **kwargs)
        if looks.shape[-1] != count or looks.dim() < 2:
            return None
        changed = part.reshape(*looks.shape[:-1], part.shape[-1])
    else:
        return None
    return logits.arranged(changed)


def looks_changed(shape: torch.Size, index: Any) -> bool:
    """Whether an index changes the last dimension."""
    items = index if isinstance(index, tuple) else (index,)
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    if any(isinstance(item, Tensor) and item.dtype == torch.bool for item in items):
        return True
    if used < len(shape) and not (Ellipsis in [item for item in items if not isinstance(item, Tensor)] and used):
        return False
    last = items[-1]
    return not (isinstance(last, slice) and last == slice(None)) and last is not Ellipsis


def _wholes(value: Any) -> Any:
    if isinstance(value, CutLogits):
        return value.whole()
    if isinstance(value, tuple | list):
        return type(value)(map(_wholes, value))
    if isinstance(value, dict):
        return {name: _wholes(each) for name, each in value.items()}
    return value


def cut_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The mean over all targets of the batch, the same on every rank; or the sum over the targets of this rank.

    None if the logits are whole or must be gathered.
    """
    plain = reduction in ("mean", "sum") and weight is None and size_average is None and reduce is None
    if not isinstance(input, CutLogits) or not plain or input.dim() != 2 or target.is_floating_point():
        return None
    logits, part, axis, grid = input, input.part, input.axis, input.network.grid
    counted = target != ignore_index
    if axis.size == 1:
        total = functional.cross_entropy(
            part, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
        )
    else:
        check_indices(target, logits.classes.count, f"{logits.origin}: target", ignore_index)
        total = VocabularyCrossEntropy.apply(
            part, target, counted, label_smoothing, axis, logits.classes, f"{logits.origin} loss", Steps()
        )
    if reduction == "sum":
        return total if logits.checked is None else BatchValue.of(total, logits.checked)
    everybody, ranks = logits.network.axis("data", "z"), grid.data * grid.z

    def mean(total: Tensor, count: Tensor) -> Tensor:
        found: Tensor = Mean.apply(total, count, everybody, ranks, f"{logits.origin} loss")
        return found

    # The strands of a weave have one loss together.
    return weave.meet(mean, total, counted.sum().to(total.dtype))
