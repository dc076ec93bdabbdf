"""The named grid of devices: `pipe × data × z × y × x`, as a value.

A grid gives the size of each axis and the order of the axes on the ranks. It has no process groups: `comm.Network`
joins a live grid, and the planner compares thousands of grids without process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral

from cubeloom.base.divisors import divisors, nearest_multiples
from cubeloom.base.errors import UserError
from cubeloom.base.limits import RANKS

AXES = ("pipe", "data", "z", "y", "x")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of the axes, and their order on the ranks from outermost to innermost.

    `Grid(z=2, x=2)` has ranks 0..3 at (z, x) = (0,0), (0,1), (1,0), (1,1): x, the innermost axis, has neighbouring
    ranks.
    """

    pipe: int = 1
    """Stages of the pipeline."""
    data: int = 1
    """Copies of the model, each with its part of the batch (data parallelism)."""
    z: int = 1
    """Cuts the rows of activations, and weights at rest (FSDP)."""
    y: int = 1
    """Cuts the output features of a block's first linear layer, and the input features of its second (tensor parallelism)."""
    x: int = 1
    """Cuts the input features of a block's first linear layer, and the output features of its second."""
    placement: tuple[str, ...] = AXES
    """The order of the axes on the ranks, from outermost to innermost: neighbours on the last are neighbouring ranks."""

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            # numpy's integers are `Integral` too, and so are bools, which nobody means.
            if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
                raise UserError(f"grid axis {axis} must be a whole number from 1 up, got {size!r}")
            object.__setattr__(self, axis, int(size))
        if self.world > RANKS:
            raise UserError(f"the grid {self} has {self.world:,} ranks: at most {RANKS:,} can be looked at")
        if sorted(self.placement) != sorted(AXES):
            raise UserError(f"a placement names each of {', '.join(AXES)} once, got {', '.join(self.placement)}")

    @classmethod
    def parse(cls, text: str, placement: tuple[str, ...] = AXES) -> Grid:
        """`x=2,y=2,z=2` and the like; axes not named have size 1."""
        return cls(**cls.values_of(text), placement=placement)

    @staticmethod
    def values_of(text: str) -> dict[str, int]:
        """The sizes of all axes in `x=2,y=2,z=2` and the like."""
        sizes: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            axis, _, number = part.partition("=")
            if axis not in AXES:
                raise UserError(f"unknown grid axis {axis!r} in {text!r}; the axes are {', '.join(AXES)}")
            if axis in sizes:
                raise UserError(f"grid axis {axis} is given twice in {text!r}")
            if not number.isdecimal() or int(number) < 1:
                raise UserError(f"grid axis {axis} needs a whole number from 1 up, as in {axis}=2; got {part!r}")
            sizes[axis] = int(number)
        return {axis: sizes.get(axis, 1) for axis in AXES}

    def __str__(self) -> str:
        parts = [f"{axis}={self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return ",".join(parts) or "x=1"

    def size(self, axis: str) -> int:
        size: int = getattr(self, axis)
        return size

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: self.size(axis) for axis in AXES}

    @property
    def world(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def cube(self) -> int:
        """Devices that share one copy of the model: x·y·z."""
        return self.x * self.y * self.z

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates; axes not named are at 0."""
        rank = 0
        for axis in self.placement:
            rank = rank * self.size(axis) + coordinates.get(axis, 0)
        return rank

    def coordinates(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.world:
            raise UserError(f"rank {rank} is not on the grid {self}, which has ranks 0 to {self.world - 1}")
        found: dict[str, int] = {}
        for axis in reversed(self.placement):
            rank, found[axis] = divmod(rank, self.size(axis))
        return {axis: found[axis] for axis in AXES}

    def share(self, coordinates: Mapping[str, int], samples: int) -> slice:
        """Which samples of a batch the ranks at these coordinates take: a batch is cut over data, and within it over z."""
        parts = self.data * self.z
        if samples % parts:
            raise UserError(
                f"a batch of {samples} samples does not divide over data={self.data} and z={self.z}, which take a multiple"
                f" of {parts}: {nearest_multiples(samples, parts)}"
            )
        size = samples // parts
        first = (coordinates["data"] * self.z + coordinates["z"]) * size
        return slice(first, first + size)

    def line(self, rank: int, axes: tuple[str, ...]) -> list[int]:
        """The ranks that differ from `rank` only along `axes`, the last axis varying fastest."""
        ranks = [self.rank({**self.coordinates(rank), **dict.fromkeys(axes, 0)})]
        for axis in axes:
            stride = self.rank({axis: 1}) if self.size(axis) > 1 else 0
            ranks = [each + step * stride for each in ranks for step in range(self.size(axis))]
        return ranks


def grids(world: int, axes: tuple[str, ...]) -> Iterator[Grid]:
    """Every grid of `world` devices over these axes."""

    def split(rest: int, left: tuple[str, ...], sizes: dict[str, int]) -> Iterator[Grid]:
        if len(left) == 1:
            yield Grid(**{**sizes, left[0]: rest}, placement=AXES)
            return
        for size in divisors(rest):
            yield from split(rest // size, left[1:], {**sizes, left[0]: size})

    yield from split(world, axes, {})
