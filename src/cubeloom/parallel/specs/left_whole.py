"""Modules of traced models whose parameters each rank of the plane uses whole, or of which it uses its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from cubeloom.parallel.arrangement import Arrangement, exchanged
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.layout import Axes, Layout
from cubeloom.parallel.specs.linear import gradient_scatter
from cubeloom.parallel.specs.spec import ROWS, LayerSpec, Parameter, Transfer
from cubeloom.parallel.specs.traced import PLANE


@dataclass(frozen=True)
class WholeParameter:
    """A parameter that is used whole. `differing`: axes whose ranks use it for other features, with partial gradients.

    `cutting` axes cut its dimension `dim`. A forward of the model gathers it `times`, where it rests cut.
    """

    name: str
    shape: tuple[int, ...]
    differing: Axes = ()
    trained: bool = True
    dim: int = 0
    cutting: Axes = ()
    times: int = 1

    @property
    def plane(self) -> Axes:
        """Axes of the plane whose ranks use the same part of the parameter."""
        return tuple(axis for axis in PLANE if axis not in self.cutting)

    def part(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of what a rank uses, where axes have so many ranks."""
        parts = prod(sizes[axis] for axis in self.cutting)
        return tuple(size // parts if place == self.dim else size for place, size in enumerate(self.shape))

    def layout(self, rest: Axes = (), partial_gradient: Axes = ()) -> Layout:
        """The layout. `rest`: axes that also cut its first dimension in storage."""
        dims = tuple(
            (f"dim{place}", (*(self.cutting if place == self.dim else ()), *(rest if place == 0 else ())))
            for place in range(max(1, len(self.shape)))
        )
        return Layout(dims, partial_gradient=frozenset(partial_gradient))


@dataclass(frozen=True, kw_only=True)
class WholeSpec(LayerSpec):
    """A module whose parameters each rank of the plane uses whole, or of which it uses its part.

    `times`: forwards in a step. In storage, all axes that divide a parameter cut it. This moves as many bytes as an
    all-reduce of replicated gradients.
    """

    kind: str
    why: str
    own: tuple[WholeParameter, ...]
    forward_flops: float = 0.0  # of one rank's samples

    def rests(self, each: WholeParameter, c: ParallelConfig) -> Iterator[tuple[Axes, Any]]:
        """The axes that may cut the first dimension in storage, each with the decompositions where they do."""
        own = each.cutting if each.dim == 0 else ()
        rows, left = each.shape[0] if each.shape else 1, c.weights_cut & (len(each.shape) > 1)
        for axes in ((*each.plane, "z"), ("z",)):
            if axes == ("z",) or not own:
                when = left & (c.size(*axes) > 1) & (rows % c.size(*axes, *own) == 0)
                yield axes, when
                left = left & (1 - when)

    def rest(self, each: WholeParameter, c: ParallelConfig) -> Axes:
        """The axes that cut the first dimension in storage on one decomposition."""
        return next((axes for axes, when in self.rests(each, c) if when), ())

    def transfers(self, c: ParallelConfig) -> Iterator[Transfer]:
        for each in self.own:
            elements = 1
            for size in each.shape:
                elements *= size
            for axes, when in self.rests(each, c):
                rest, used = each.layout(axes), each.layout((), (*ROWS, *each.plane))
                still = tuple(axis for axis in ("data", *each.plane) if axis not in axes)
                for _ in range(each.times):
                    yield Transfer("F", rest, used, elements, when=when, of_weight=True)
                    if each.trained:
                        yield gradient_scatter(rest, used, elements, when, still)

    def parameters(self, c: ParallelConfig) -> Iterator[Parameter]:
        for each in self.own:
            # Ranks that compute the same gradient average it: GPU rounding is not reproducible, and replicas would
            # drift apart.
            alike = tuple(axis for axis in each.plane if axis not in each.differing)
            name, shape = f"{self.name}.{each.name}".removeprefix("."), each.shape or (1,)
            arranged, trained, left = partial(self._arrangement, each, c), each.trained, 1
            for axes, when in self.rests(each, c):
                summed = tuple(axis for axis in ("data", *each.plane) if axis not in axes)
                yield Parameter(name, shape, each.layout(axes), summed, when, arranged, alike, trained)
                left = left & (1 - when)
            yield Parameter(name, shape, each.layout(), (*ROWS, *each.plane), left, arranged, alike, trained)

    def _arrangement(self, each: WholeParameter, c: ParallelConfig) -> Arrangement | None:
        if each.cutting != ("y", "x"):
            return None
        found = exchanged(each.shape[each.dim], int(c.y), int(c.x))
        return None if found is None else replace(found, dim=each.dim)

    def touched(self, c: ParallelConfig) -> None:
        return None

    def saved(self, c: ParallelConfig) -> Any:
        return 0.0

    def flops(self, sequence: int) -> float:
        return self.forward_flops
