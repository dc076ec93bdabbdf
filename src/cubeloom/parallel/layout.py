"""The layout of a tensor on the grid, as a value, and the collectives that redistribute it to another layout.

A layout names, for each dimension of a tensor, the grid axes that cut it, outermost first. (JAX: a PartitionSpec with
unreduced axes; DTensor: placements, listed by dimension.) Along an axis that cuts no dimension a tensor is one of

- replicated: every rank has the same values and the same gradient;
- `partial`: every rank has a partial sum;
- replicated with `partial_gradient`: every rank has the same values but uses them differently, so each has a partial
  sum of the gradient.

`redistribute` returns the collectives between two layouts. Their backward is also a redistribution: from the layout of
the target's gradient to that of the source's. Bytes, gradient reductions and checks follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any, Literal

Axes = tuple[str, ...]
Operation = Literal["slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather"]
_ORDER = ("data", "z", "x", "y")  # the order of axes in the name of a process group
_PASSES = {"slice": 0, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1, "all_gather": 1}


class LayoutError(ValueError):
    """No collectives connect two layouts."""


@dataclass(frozen=True)
class Layout:
    """`Layout.of(rows=("data", "z"), features="y", partial="x")`: the output of a matmul whose inner dimension x cuts."""

    dims: tuple[tuple[str, Axes], ...]
    partial: frozenset[str] = frozenset()
    partial_gradient: frozenset[str] = frozenset()

    @classmethod
    def of(cls, *, partial: str | Axes = (), partial_gradient: str | Axes = (), **dims: str | Axes | None) -> Layout:
        """Dimensions by name. Each has a tuple of axes, a single axis, or None."""
        return cls(
            tuple((name, _axes(axes)) for name, axes in dims.items()),
            frozenset(_axes(partial)),
            frozenset(_axes(partial_gradient)),
        )

    def axes(self, dim: str) -> Axes:
        """The axes that cut this dimension."""
        return dict(self.dims)[dim]

    @property
    def cutting(self) -> Axes:
        """All axes that cut a dimension."""
        return tuple(axis for _, axes in self.dims for axis in axes)

    @property
    def gradient(self) -> Layout:
        """The layout of the tensor's gradient."""
        return Layout(self.dims, self.partial_gradient, self.partial)

    def with_dims(self, **dims: str | Axes | None) -> Layout:
        """The same layout with other axes for some dimensions."""
        return replace(self, dims=tuple((name, _axes(dims.get(name, axes))) for name, axes in self.dims))

    def on(self, sizes: Mapping[str, int]) -> Layout:
        """The layout without axes of one rank."""
        dims = tuple((name, tuple(axis for axis in axes if sizes[axis] > 1)) for name, axes in self.dims)
        partial, gradient = (
            frozenset(axis for axis in axes if sizes[axis] > 1) for axes in (self.partial, self.partial_gradient)
        )
        return Layout(dims, partial, gradient)

    def __str__(self) -> str:
        """`[rows/data·z, features/x], a partial sum over y`."""
        cut = ", ".join(f"{dim}/{'·'.join(axes)}" if axes else dim for dim, axes in self.dims)
        summed = f", a partial sum over {'·'.join(sorted(self.partial))}" if self.partial else ""
        apart = f", used differently along {'·'.join(sorted(self.partial_gradient))}" if self.partial_gradient else ""
        return f"[{cut}]{summed}{apart}"


def _axes(axes: str | Axes | None) -> Axes:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


@dataclass(frozen=True)
class Move:
    """One collective. `larger` is the layout on its larger side: before a reduction or a slice, after an all-gather."""

    operation: Operation
    axes: Axes
    larger: Layout
    dim: str | None = None  # the dimension that is gathered, scattered or sliced
    exchange: bool = False  # an all-to-all over two axes that exchange the dimensions they cut

    def received(self, elements: Any, size: Callable[..., Any], place: Mapping[str, Any]) -> Any:
        """What a rank receives, as in a ring, for a tensor of `elements` (or bytes). `size` counts the ranks of axes.

        All ranks receive the same, unless two axes exchange dimensions: then it depends on `place`, the rank's
        coordinates.
        """
        local = local_elements(elements, self.larger, size)
        if self.exchange:
            return local * (1 - _kept(self.axes, size, place))
        parts = size(*self.axes)
        return _PASSES[self.operation] * ((parts - 1) / parts) * local


def _kept(axes: Axes, size: Callable[..., Any], place: Mapping[str, Any]) -> Any:
    """The share of its block that a rank keeps when two axes exchange dimensions: the overlap of its old and new block.

    Old: part ix of X of one dimension, part iy of Y of the other. New: part iy of Y, and part ix of X.
    """
    (x, ix), (y, iy) = ((size(axis), place[axis]) for axis in axes)
    low, high = _largest(ix / x, iy / y), -_largest(-(ix + 1) / x, -(iy + 1) / y)
    return _largest(high - low, 0 * low) ** 2 * x * y


def _largest(first: Any, second: Any) -> Any:
    """The maximum of two numbers, fractions or arrays."""
    more = first > second
    return more * first + (1 - more) * second


@cache
def redistribute(source: Layout, target: Layout) -> tuple[Move, ...]:
    """The collectives from one layout to the other. Those that make the tensor smaller come first."""
    return tuple(_moves(source, target))


def backward(source: Layout, target: Layout) -> tuple[Move, ...]:
    """The collectives of a redistribution's backward."""
    return redistribute(target.gradient, source.gradient)


def _moves(source: Layout, target: Layout) -> Iterator[Move]:
    if [name for name, _ in source.dims] != [name for name, _ in target.dims]:
        raise LayoutError(f"{source} and {target} have different dimensions")
    _refuse(source, target)
    dims = dict(source.dims)
    exchanged = _exchanged(source, target)
    summed = source.partial - target.partial
    now = source

    def cut(dim: str, axes: Axes) -> Layout:
        dims[dim] = axes
        return replace(now, dims=tuple(dims.items()))

    if exchanged:
        yield Move("all_to_all", exchanged, now, exchange=True)
        now = target
        dims = dict(now.dims)
    for dim, wanted in target.dims:
        for kind, group in groupby(_added(dims[dim], wanted), lambda axis: (axis in summed, axis in source.cutting)):
            axes = tuple(group)
            operation: Operation = "reduce_scatter" if kind[0] else "all_to_all" if kind[1] else "slice"
            yield Move(operation, axes, now, dim)
            for name, cutting in dims.items():
                dims[name] = tuple(axis for axis in cutting if axis not in axes)
            now = replace(cut(dim, (*dims[dim], *axes)), partial=now.partial - set(axes))
    if reduced := tuple(axis for axis in _ORDER if axis in now.partial - target.partial):
        yield Move("all_reduce", reduced, now)
        now = replace(now, partial=now.partial - set(reduced))
    for dim, wanted in target.dims:
        rest = dims[dim][len(wanted) :]
        now = cut(dim, wanted)
        # A new partial sum is padded with zeros, which moves nothing.
        if gathered := tuple(axis for axis in rest if axis not in target.partial):
            yield Move("all_gather", gathered, now, dim)


def _added(have: Axes, wanted: Axes) -> Axes:
    """The axes that cut a dimension further."""
    return wanted[len(have) :] if wanted[: len(have)] == have else ()


def _exchanged(source: Layout, target: Layout) -> Axes:
    """Two axes, each innermost in the dimension that the other one cut before."""
    moved = [
        (axis, old, new)
        for old, axes in source.dims
        for axis in axes
        for new, others in target.dims
        if axis in others and new != old
    ]
    if len(moved) != 2 or (moved[0][1], moved[0][2]) != (moved[1][2], moved[1][1]):
        return ()
    return tuple(sorted(axis for axis, _, _ in moved))


def _refuse(source: Layout, target: Layout) -> None:
    """Raise LayoutError if no collectives connect the two."""
    if more := target.partial - source.partial - set(source.cutting):
        raise LayoutError(f"nothing makes {source} a partial sum over {'·'.join(sorted(more))}")
    if alike := source.partial_gradient - target.partial_gradient - set(target.cutting):
        raise LayoutError(
            f"{source}: along {'·'.join(sorted(alike))} each rank has a summand of its gradient; {target} has the whole on each"
        )
    exchanged = _exchanged(source, target)
    for dim, wanted in target.dims:
        have = source.axes(dim)
        if exchanged:
            have, wanted = (tuple(axis for axis in axes if axis not in exchanged) for axes in (have, wanted))
        short = min(len(have), len(wanted))
        if have[:short] != wanted[:short]:
            raise LayoutError(f"{dim} of {source} and of {target} are cut in another order")


def local_elements(elements: Any, layout: Layout, size: Callable[..., Any]) -> Any:
    """The number of a tensor's elements on one rank."""
    return elements / size(*layout.cutting)
