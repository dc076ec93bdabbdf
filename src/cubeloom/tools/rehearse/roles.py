"""The roles of ranks: ranks of one role run the same program with other coordinates, so one can represent all.

A rank's program depends on its pipeline worker, which determines its stages. All other work is divided evenly, so ranks
that differ in data, z, y or x do the same with other ranks, with two exceptions. A turn redistributes features in the
plane of x and y, and what a rank exchanges with which other depends on its place in the plane. And copies of keys and
values are on some ranks of z, or of replicas that divide an update. If so on one pipeline worker, the ranks of all
workers differ: they communicate with ranks that differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain, product

from cubeloom.base.grid import AXES, Grid
from cubeloom.comm.recording_backend import Group
from cubeloom.parallel.specs import LayerSpec, LinearSpec, shared_copies
from cubeloom.tools.verify import Experiment

_INSIDE = tuple(axis for axis in AXES if axis != "pipe")


@dataclass(frozen=True)
class Role:
    """What a rank's program depends on."""

    place: int  # the pipeline worker
    plane: tuple[int, int] | None = None  # x and y, if they matter
    rows: tuple[int, int] | None = None  # z and data, if they matter


@dataclass(frozen=True)
class Line:
    """A group as seen by any rank of a role: all ranks along `axes`, on the workers `places`, otherwise at its
    coordinates.

    `count`: of its one axis not all ranks, but this many neighbours.
    """

    axes: tuple[str, ...]
    places: tuple[int, ...]
    copy: int = 0
    count: int | None = None

    def ranks(self, grid: Grid, rank: int) -> tuple[int, ...]:
        """The group of this rank."""
        here = grid.coordinates(rank)
        along = {axis: range(grid.size(axis)) for axis in self.axes}
        if self.count is not None:
            (axis,) = self.axes
            first = here[axis] // self.count * self.count
            along[axis] = range(first, first + self.count)
        names = ("pipe", *self.axes)
        steps = product(self.places, *along.values())
        return tuple(sorted(grid.rank({**here, **dict(zip(names, step, strict=True))}) for step in steps))


def line_of(grid: Grid, rank: int, group: Group) -> Line:
    """A rank's group as a line of the grid. ValueError if it is not one: then other ranks' groups cannot be derived."""
    here = grid.coordinates(rank)
    members = [grid.coordinates(member) for member in group.ranks]
    axes = tuple(axis for axis in _INSIDE if any(each[axis] != here[axis] for each in members))
    places = tuple(sorted({each["pipe"] for each in members}))
    some = len(axes) == 1 and len(members) < len(places) * grid.size(axes[0])
    line = Line(axes, places, group.copy, len(members) // len(places) if some else None)
    if line.ranks(grid, rank) != tuple(sorted(group.ranks)):
        raise ValueError(f"the group of ranks {list(group.ranks)} is no line of the grid {grid}")
    return line


class Roles:
    """The roles of an experiment's ranks."""

    def __init__(self, experiment: Experiment) -> None:
        self.grid = experiment.grid
        schedule = experiment.schedule
        layers: list[Iterable[LayerSpec]] = [experiment.specs()] if schedule is None else []
        if schedule is not None:
            layout = experiment.layout(schedule)
            layers = [
                [spec for _, stage in schedule.held_by(place) for spec in layout.specs_of(stage)]
                for place in range(self.grid.pipe)
            ]
        layers = [list(specs) for specs in layers]
        self._turning = any(map(_turns, chain(*layers)))
        # Only ZeRO-1 divides rows over replicas; if rows are cut, z or data cuts them.
        self._copying = any(shared_copies(specs, self.grid) for specs in layers)
        self.of = cache(self._of)

    def _of(self, rank: int) -> Role:
        here = self.grid.coordinates(rank)
        plane = (here["x"], here["y"]) if self._turning else None
        return Role(here["pipe"], plane, (here["z"], here["data"]) if self._copying else None)

    def distinct(self, wanted: Iterable[int] = ()) -> list[int]:
        """Ranks that together have every role: the requested ones, and the first rank of each missing role."""
        found = list(dict.fromkeys(wanted))
        have = {self.of(rank) for rank in found}
        for rank in range(self.grid.world):
            if self.of(rank) not in have:
                have.add(self.of(rank))
                found.append(rank)
        return found


def _turns(spec: LayerSpec) -> bool:
    return isinstance(spec, LinearSpec) and spec.turn
