"""The rules of `x[...]` and of assignment to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from cubeloom.base.operations import is_mask
from cubeloom.parallel.check.pointwise import joined
from cubeloom.parallel.check.step import Refused, Rule, Step, alike, parts_in_words, spans
from cubeloom.parallel.check.tracked import Dim, Dims, Tracked, cut_out, is_cut, local_shape, parts_of, size_of, uncut


def get(step: Step) -> list[Dims]:
    return [indexed(step, step.inputs[0])]


def put(step: Step) -> list[Dims]:
    """If not everything is assigned to, the indexed dimensions must be whole. The value has the layout of the part."""
    tracked, value = step.inputs[0], step.args[2]
    index = step.args[1]
    if isinstance(index, Tensor) and is_mask(index) and not isinstance(value, Tensor):
        step.refuse_other_numbers()
        # A mask over the first dimensions.
        mask = (*step.of(index).dims, *((),) * (len(tracked.dims) - index.dim()))
        if joined("assignment by a mask", [tracked.dims, mask], tracked.shape) != tracked.dims:
            raise Refused(
                f"assignment by a mask {step.of(index)} to {tracked}, which is made of the size of a rank's part"
            )
        return [tracked.dims]
    part = indexed(step, tracked)
    if isinstance(value, Tensor):
        shape = tuple(map(size_of, part))
        both = joined("assignment", [part, step.of(value).dims], shape)
        if both != part:
            raise Refused(
                f"assignment to {tracked}, which is made of the size of a rank's part, of {step.of(value)}; make it with"
                " torch.zeros_like or torch.empty_like of a tensor that is cut so"
            )
    return [tracked.dims]


def indexed(step: Step, tracked: Tracked) -> Dims:
    """The part of a tensor that an index takes."""
    own = _items(step.args[1])
    whole = _items(_whole_index(step))
    if len(own) != len(whole):
        raise Refused(f"an index has {len(own)} parts on a rank and {len(whole)} in the serial model")
    sizes = tracked.shape, local_shape(tracked.dims)
    used = sum(1 for item in own if item is not None and item is not Ellipsis)
    place, found, tensors, apart = 0, list[Dim](), list[tuple[int, Tracked]](), False
    for mine, theirs in zip(own, whole, strict=True):
        if mine is Ellipsis:
            rest = len(tracked.dims) - used
            found += tracked.dims[place : place + rest]
            place += rest
        elif mine is None:
            found.append(())
        elif isinstance(mine, Tensor):
            apart |= bool(tensors) and tensors[-1][0] != len(found)
            _refuse_cut_place(step, tracked, place)
            tensors.append((len(found), step.of(mine)))
            place += 1
        elif isinstance(mine, list) and _takes_kept(tracked.dims[place], mine, theirs):
            found.append(uncut([len(mine)])[0])
            place += 1
        elif isinstance(mine, list):
            _refuse_cut_place(step, tracked, place)
            found.append(uncut([len(mine)])[0])
            place += 1
        elif isinstance(mine, slice):
            found.append(_sliced(step, tracked, place, mine, theirs, (sizes[0][place], sizes[1][place])))
            place += 1
        else:
            _refuse_cut_place(step, tracked, place)
            if not alike(mine, theirs):
                step.refuse_other_numbers()
            place += 1
    found += tracked.dims[place:]
    return _with_tensors(step, found, tensors, apart)


def _whole_index(step: Step) -> Any:
    """The index of the whole run, with the rank's tensors in it."""
    numbers = iter(step.whole_numbers)

    def filled(item: Any) -> Any:
        if isinstance(item, list):
            return [next(numbers, None) for _ in item]
        return item if isinstance(item, Tensor) else next(numbers, None)

    index = step.args[1]
    return tuple(map(filled, index)) if isinstance(index, tuple) else filled(index)


def _items(index: Any) -> Sequence[Any]:
    items = index if isinstance(index, tuple) else (index,)
    for item in items:
        if not (item is None or item is Ellipsis or isinstance(item, Tensor | slice | int | list)) or isinstance(
            item, bool
        ):
            raise Refused(f"an index of {type(item).__name__} into a cut tensor has no rule")
        if isinstance(item, Tensor) and is_mask(item):
            raise Refused("an index by a mask among others has no rule; torch.where has one")
        if isinstance(item, list) and not all(isinstance(each, int) and not isinstance(each, bool) for each in item):
            raise Refused("an index by a list of anything but numbers has no rule")
    if sum(isinstance(item, Tensor | list) for item in items) > 1 and any(isinstance(item, list) for item in items):
        raise Refused("an index by a list among others has no rule")
    return items


def _sliced(step: Step, tracked: Tracked, place: int, mine: Any, theirs: Any, sizes: tuple[int, int]) -> Dim:
    whole, own = (range(*item.indices(size)) for item, size in zip((theirs, mine), sizes, strict=True))
    if (whole, own) == (range(sizes[0]), range(sizes[1])):
        return tracked.dims[place]
    dim = tracked.dims[place]
    if is_cut(dim) and whole.step == own.step == 1 and cut_out(dim, whole.start, whole.stop) is not None:
        return spans(step, tracked, place, [(whole.start, whole.stop)], [(own.start, own.stop)], "take its own part")[0]
    _refuse_cut_place(step, tracked, place)
    if whole != own:
        step.refuse_other_numbers()
    return uncut([len(whole)])[0]


def _takes_kept(dim: Dim, mine: Sequence[int], theirs: Any) -> bool:
    """Whether the same elements are taken from sections that every rank has whole."""
    if len(dim) != 1 or not dim[0].kept or not isinstance(theirs, list) or len(mine) != len(theirs):
        return False
    factor, ends = dim[0], list(accumulate(dim[0].sections, initial=0))
    local = factor.local(factor.size)
    for own, place in zip(mine, (each % factor.size for each in theirs), strict=True):
        section = next(number for number, end in enumerate(ends[1:]) if place < end)
        if section not in factor.kept or own % local != factor.local(ends[section]) + place - ends[section]:
            return False
    return True


def _refuse_cut_place(step: Step, tracked: Tracked, place: int) -> None:
    dim = tracked.dims[place]
    if is_cut(dim):
        raise Refused(
            f"an index into dimension {place} of {tracked}, which {parts_in_words(dim)}: each of {parts_of(dim)} ranks would"
            " take it of its own part"
        )


def _with_tensors(step: Step, found: list[Dim], tensors: Sequence[tuple[int, Tracked]], apart: bool) -> Dims:
    if not tensors:
        return tuple(found)
    count = max(len(index.dims) for _, index in tensors)
    sizes = [1] * count
    for _, index in tensors:
        for place, dim in enumerate(index.dims, count - len(index.dims)):
            sizes[place] = max(sizes[place], size_of(dim))
    at = 0 if apart else tensors[0][0]
    return (*found[:at], *joined("an index", [index.dims for _, index in tensors], tuple(sizes)), *found[at:])


RULES: dict[str, Rule] = {"getitem": get, "setitem": put}
