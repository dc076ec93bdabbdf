"""What torch's functions and operations compute, by their names and tags."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_COPIES = {"detach", "clone", "alias", "_to_copy", "copy_", "zeros_like", "ones_like", "empty_like", "full_like"} | {
    *("rand_like", "randn_like", "fill_", "zero_")
}
# Methods and optimizers that are no operation by their name.
_NAMED = {"to", "type", "float", "double", "half", "bfloat16", "requires_grad", "adamw", "sgd", "deepcopy"}


def is_elementwise(operation: Any) -> bool:
    """Whether an operation on tensor subclasses is element-wise."""
    return torch.Tag.pointwise in operation.tags or operation.overloadpacket.__name__ in _COPIES


def name_of_function(function: Any) -> str | None:
    """Of what `__torch_function__` is called for: the operation's name. None for an attribute, but not for `data`."""
    name = function.__name__
    if name in ("__get__", "__set__"):
        return "detach" if getattr(function.__self__, "__name__", "") == "data" and name == "__get__" else None
    return str(name)


@cache
def names_elementwise(name: str) -> bool:
    """The same as `is_elementwise`, of a function's or a method's name, such as `__mul__` or `_foreach_add_`."""
    name = name.strip("_").removeprefix("foreach_").removeprefix("fused_")
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, name.removeprefix("r"), None)
    operations = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return name in _NAMED or any(map(is_elementwise, operations))


def every_head(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of attention with as many heads of keys and values as of queries.

    Before torch 2.13 its formulas of FLOPs want so.
    """
    tensors = [each for each in args if isinstance(each, Tensor) and each.dim() == 4]
    heads = max(each.shape[1] for each in tensors)
    whole = {id(each): each.new_empty(len(each), heads, *each.shape[2:], device="meta") for each in tensors}
    return tuple(whole.get(id(each), each) for each in args)
