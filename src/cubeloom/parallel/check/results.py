"""Tensors in what a model takes or gives, and where they are in it: `logits`, `0`, `hidden_states.1`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

from torch import Tensor

from cubeloom.parallel.check.tracked import Dim, Tracked, size_of
from cubeloom.parallel.outputs import Output, Plane

_SAMPLES = ("data", "z")


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """With where each is."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, each in _items(value):
        yield from tensors_in(each, f"{path}.{key}" if path else str(key))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value))


def mapped(change: Callable[[str, Tensor], Any], value: Any, path: str = "") -> Any:
    """The same with other tensors."""
    if isinstance(value, Tensor):
        return change(path, value)
    changed = {
        key: mapped(change, each, f"{path}.{key}" if path else str(key))
        for key, each in _items(value)
        if each is not None
    }
    if not any(each is not old for key, old in _items(value) for each in [changed.get(key, old)]):
        return value
    if isinstance(value, list | tuple):
        items = [changed.get(at, each) for at, each in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    made: Any = copy(value)
    for key, each in changed.items():
        if isinstance(value, Mapping):
            made[key] = each
        else:
            object.__setattr__(made, key, each)
    return made


def output_of(tracked: Tracked, counts: Mapping[int, int]) -> Output:
    """`counts`: of sizes with padding, those without."""
    samples, plane = None, []
    for at, dim in enumerate(tracked.dims):
        axes = tuple(axis for factor in dim for axis, _ in factor.cutting)
        if not axes:
            continue
        first = tuple(axis for axis in axes if axis in _SAMPLES)
        inner = axes[len(first) :]
        if not _simple(dim) or axes[: len(first)] != first or (first and samples is not None):
            return Output(None, (), unclear=True)
        samples = at if first else samples
        if inner:
            size = size_of(dim)
            padded = not first and size in counts
            plane.append(Plane(at, inner, size // dim[0].parts, counts[size]) if padded else Plane(at, inner))
    if any(factor.ratio > 1 for dim in tracked.dims for factor in dim):
        return Output(None, (), unclear=True)
    return Output(samples, tuple(plane))


def _simple(dim: Dim) -> bool:
    """A contiguous part."""
    return len(dim) == 1 and not dim[0].sections and dim[0].ratio == 1
