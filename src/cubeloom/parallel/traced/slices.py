"""Arguments of modules of which each rank takes its part: constants, such as attention biases that differ by head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from cubeloom.parallel.check.tracked import Dim
from cubeloom.parallel.traced.choices import Sliced


def with_argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], which: str | int, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with one changed, if it is a tensor."""
    args, kwargs = list(args), dict(kwargs)
    if isinstance(which, int):
        if which < len(args) and isinstance(args[which], Tensor):
            args[which] = change(args[which])
    elif isinstance(kwargs.get(which), Tensor):
        kwargs[which] = change(kwargs[which])
    return tuple(args), kwargs


@dataclass(frozen=True)
class OwnParts:
    """A hook before a module's forward. `coordinates` are this rank's, by axis."""

    slices: tuple[Sliced, ...]
    coordinates: Mapping[str, int]

    def __call__(self, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for each in self.slices:
            args, kwargs = with_argument(args, kwargs, each.argument, partial(self._of, each))
        return args, kwargs

    def _of(self, each: Sliced, whole: Tensor) -> Tensor:
        return part_of(whole, each.place, each.dim, self.coordinates)


def part_of(whole: Tensor, place: int, factors: Dim, coordinates: Mapping[str, int]) -> Tensor:
    """Its dimension is taken apart into factors, the first of which may have any size."""
    sizes = [-1 if not number and not factor.cutting else factor.size for number, factor in enumerate(factors)]
    part = whole.unflatten(place, sizes) if len(sizes) > 1 else whole
    for number, factor in enumerate(factors):
        start, size = 0, factor.size
        for axis, count in factor.cutting:
            size //= count
            start += coordinates[axis] * size
        if factor.cutting:
            part = part.narrow(place + number, start, size)
    return part.flatten(place, place + len(sizes) - 1) if len(sizes) > 1 else part
