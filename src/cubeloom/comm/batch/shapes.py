"""Rules of functions that arrange numbers, and compute none."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from cubeloom.base import torch_private
from cubeloom.comm.batch.call import NOT_FOLLOWED, Call
from cubeloom.comm.batch.parts import Parts

_MARK = 7  # the stride of the samples in a tensor that is looked at in their place


def _marked(call: Call) -> Tensor:
    """No other dimension has a stride that is a part of the mark, and none that is a multiple of it is the mark."""
    return call.look(tuple(_MARK if at == call.like.cut else 1009 + 16 * at for at in range(len(call.like.sizes))))


def _place(whole: Tensor, samples: int) -> int | None:
    """Where all samples are in a view of what was marked."""
    found = [at for at, stride in enumerate(whole.stride()) if stride == _MARK]
    return found[0] if len(found) == 1 and whole.shape[found[0]] == samples else None


def strided(call: Call) -> Any:
    """Views that keep dimensions, or leave some out: `transpose`, `unsqueeze`, `split`, basic indices."""
    if len(call.tensors) != 1 or not isinstance(call.first, Parts):
        return NOT_FOLLOWED
    if call.name == "getitem" and not _is_basic(call.args[1]):
        return NOT_FOLLOWED
    whole = call.function(_marked(call), *call.rest, **call.more)
    wholes = [each for each in torch_private.tree_leaves(whole) if isinstance(each, Tensor)]
    places = [_place(each, call.samples) for each in wholes]
    try:
        found = call.function(call.like.part, *call.rest, **call.more)
    except (RuntimeError, IndexError):  # sizes of the whole
        return NOT_FOLLOWED
    owns = [each for each in torch_private.tree_leaves(found) if isinstance(each, Tensor)]
    made = []
    for place, each, own in zip(places, wholes, owns, strict=False):
        if place is None or not _fits(own, tuple(each.shape), place, call):
            return NOT_FOLLOWED
        made.append(call.like.like(own, place))
    if len(owns) != len(wholes):
        return NOT_FOLLOWED
    return made[0] if isinstance(found, Tensor) else tuple(made)


def _is_basic(index: Any) -> bool:
    """Of which the result is a view."""
    items = index if isinstance(index, tuple) else (index,)
    return all(each is None or each is Ellipsis or type(each) in (int, slice) for each in items)


def _fits(own: Tensor, whole: tuple[int, ...], place: int, call: Call) -> bool:
    return tuple(own.shape) == _local(whole, place, call)


def _local(whole: tuple[int, ...], place: int, call: Call) -> tuple[int, ...]:
    return tuple(size // call.axis.size if at == place else size for at, size in enumerate(whole))


def squeezed(call: Call) -> Any:
    """A rank may have a single sample, whose dimension stays."""
    sizes = call.like.sizes
    given = call.argument(1, "dim")
    dims = range(len(sizes)) if given is None else [given] if isinstance(given, int) else given
    places = [dim % len(sizes) for dim in dims]
    ones = tuple(place for place in places if sizes[place] == 1)
    cut = call.like.cut - sum(place < call.like.cut for place in ones)
    return call.like.like(call.like.part.squeeze(ones), cut)


def expanded(call: Call) -> Any:
    if not isinstance(call.first, Parts):
        return NOT_FOLLOWED
    whole = call.function(_marked(call), *_looks(call.rest), **call.more)
    place = _place(whole, call.samples)
    if place is None:
        return NOT_FOLLOWED
    return call.like.like(call.like.part.expand(_local(tuple(whole.shape), place, call)), place)


def _looks(values: Any) -> Any:
    return torch_private.tree_map(
        lambda each: torch.empty(each.shape, device="meta") if isinstance(each, Tensor) else each, values
    )


def reshaped(call: Call) -> Any:
    """The samples stay outermost of the numbers that they were the outermost of."""
    if not isinstance(call.first, Parts) or any(isinstance(each, torch.dtype) for each in call.rest):
        return NOT_FOLLOWED
    sizes, cut = call.like.sizes, call.like.cut
    shape = tuple(call.function(call.look(), *_looks(call.rest), **call.more).shape)
    before = prod(sizes[:cut])
    for place, size in enumerate(shape):
        if prod(shape[:place]) == before and size > 1:
            if size % call.axis.size:
                break
            return call.like.like(call.like.part.reshape(_local(shape, place, call)), place)
    return NOT_FOLLOWED


def joined(call: Call) -> Any:
    """`cat` and `stack`, of tensors that have samples in one place."""
    tensors = call.first
    dim = call.argument(1, "dim", "axis", default=0)
    cuts = {(each.cut, each.sizes[each.cut]) for each in call.parts}
    if not isinstance(tensors, tuple | list) or len(cuts) != 1 or not isinstance(dim, int):
        return NOT_FOLLOWED
    cut, count = call.like.cut, len(call.like.sizes) + (call.name == "stack")
    dim %= count
    if call.name == "cat" and dim == cut:
        return NOT_FOLLOWED
    own = [each.part if isinstance(each, Parts) else call.at(each, cut) for each in tensors]
    own = [each.expand(call.like.part.shape) if call.name == "stack" else each for each in own]
    joined = torch.stack(own, dim) if call.name == "stack" else torch.cat(own, dim)
    return call.like.like(joined, cut + (call.name == "stack" and dim <= cut))


def padded(call: Call) -> Any:
    pad = call.argument(1, "pad", default=())
    if len(call.parts) != 1 or not isinstance(call.first, Parts) or call.like.behind <= len(pad) // 2:
        return NOT_FOLLOWED
    return call.results(call.run(call.part), call.like.behind)


def assigned(call: Call) -> bool:
    """`tensor[index] = value`, where every rank changes samples of its own; whether it could be done."""
    tensor, index, value = call.args
    if not isinstance(tensor, Parts):
        return False
    if isinstance(index, Tensor):
        alike = not isinstance(index, Parts) or index.cut == tensor.cut
        simple = not isinstance(value, Tensor) or value.dim() == 0
        if index.dtype is not torch.bool or index.dim() <= tensor.cut or not alike or not simple:
            return False
        tensor.part[index.part if isinstance(index, Parts) else call.at(index, tensor.cut)] = call.part(value)
        return True
    if not _is_basic(index):
        return False
    whole = _marked(call)[index]
    place = _place(whole, call.samples)
    if place is None:
        return False
    if isinstance(value, Parts) and value.behind != whole.dim() - place:
        return False
    if isinstance(value, Tensor) and not isinstance(value, Parts):
        value = call.at(value, value.dim() - (whole.dim() - place))
    tensor.part[index] = value.part if isinstance(value, Parts) else value
    return True


_VIEWS = """
transpose permute movedim moveaxis t T mT H mH adjoint unsqueeze select narrow split split_with_sizes chunk unsafe_chunk
tensor_split unbind getitem diagonal
"""
RULES = {
    **dict.fromkeys(_VIEWS.split(), strided),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "ravel", "view_as", "reshape_as"), reshaped),
    **dict.fromkeys(("expand", "expand_as"), expanded),
    **dict.fromkeys(("cat", "stack"), joined),
    "squeeze": squeezed,
    "pad": padded,
}
