"""How a model lies on a grid and what a micro-batch is: one decomposition, or arrays of a million.

Every closed form is written once, for either. Arrays broadcast against each other, so that a search gives each setting an axis
of its own and every formula is computed over the settings that it depends on and no others. Numbers are floats, or, to be
compared with the ledger, exact fractions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any, Literal

from cubeloom.base.grid import Grid

Activations = Literal["sharded", "replicated"]
Weights = Literal["freed", "kept", "replicated"]
Inputs = Literal["kept", "regathered"]
GradientDtype = Literal["float32", "model"]
FREED, KEPT, REPLICATED = range(3)  # how weights rest along z
Element = Literal["item", "statistic", "gradient"]
WEIGHTS: tuple[Weights, ...] = ("freed", "kept", "replicated")


@dataclass(frozen=True, kw_only=True)
class ShardingPolicy:
    """How operands are kept while nobody computes with them.

    Over forward and backward, sharded and replicated move the same bytes; freeing what was gathered costs one gather more.

    - `activations`: cut further along the axis that does not index them, or replicated along it;
    - `weights`, along z: sharded, and the gathered copy freed after the forward (gathered once more in the backward) or
      kept until the backward; or replicated, as in data parallelism;
    - `inputs` of linears for the weight gradient: the gathered copy kept, or only the shard, gathered once more;
    - `gradients` of weights with fewer digits than float32: accumulated and reduced in float32, or in the model's dtype.
    """

    activations: Activations = "sharded"
    weights: Weights = "freed"
    inputs: Inputs = "kept"
    gradients: GradientDtype = "float32"


@dataclass(frozen=True)
class Batch:
    """What one step trains on, over the whole grid."""

    samples: int
    """Sequences, or images, of a step."""
    sequence: int
    """Tokens of a sequence; 1 for images."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The grid, how operands rest on it, and what one micro-batch is."""

    data: Any
    z: Any
    y: Any
    x: Any
    samples: Any  # of a micro-batch, over the whole grid
    sequence: int
    sharded: Any = True  # activations at rest
    weights: Any = FREED
    regathered: Any = False  # inputs of linears
    ways: Any = 1
    item: int = 2  # bytes of a number
    gradients: GradientDtype = "float32"  # how those of weights of fewer digits are accumulated and reduced
    record: Any = False  # stages are recorded wherever the grid lets them
    coordinates: Mapping[str, Any] = field(default_factory=lambda: {"pipe": 0, "data": 0, "z": 0, "y": 0, "x": 0})
    """Of the rank: a turn moves different bytes on each of x and y, and copies of keys and values lie on some ranks of z."""
    rank_stride: dict[str, Any] = field(
        default_factory=dict
    )  # for each axis how many ranks lie between neighbours on it

    @classmethod
    def exact(
        cls, grid: Grid, rest: ShardingPolicy, batch: Batch, item: int, coordinates: Mapping[str, int] | None = None
    ) -> ParallelConfig:
        """One decomposition, in fractions; of the rank at these coordinates, or the first."""
        here = coordinates or grid.coordinates(0)
        return cls(
            data=Fraction(grid.data),
            z=Fraction(grid.z),
            y=Fraction(grid.y),
            x=Fraction(grid.x),
            samples=Fraction(batch.samples),
            sequence=batch.sequence,
            sharded=rest.activations == "sharded",
            weights=WEIGHTS.index(rest.weights),
            regathered=rest.inputs == "regathered",
            item=item,
            gradients=rest.gradients,
            coordinates={axis: Fraction(place) for axis, place in here.items()},
        )

    def size(self, *axes: str) -> Any:
        """How many parts these axes have together, in the arithmetic of the rest: an exact one of none."""
        return prod((getattr(self, axis) for axis in axes), start=Fraction(1) if isinstance(self.x, Fraction) else 1)

    def rows(self, per_sample: int | None = None) -> Any:
        """Tokens of one rank of data and z, or pixels."""
        return self.samples_of * (self.sequence if per_sample is None else per_sample)

    @property
    def samples_of(self) -> Any:
        """Samples of one rank of data and z."""
        return self.samples / (self.data * self.z)

    def own_samples(self, side: str, always: bool = False) -> Any:
        """Of one rank, of an activation whose features lie on this side of the plane."""
        return self.samples_of / self.row_parts("y" if side == "x" else "x", always)

    @property
    def recorded(self) -> Any:
        """Where a stage's actions are recordings, which the host starts as one: no collective and no strand is in them."""
        return self.record & (self.x * self.y * self.z == 1) & (self.ways == 1)

    @property
    def statistic(self) -> int:
        """Bytes of a number that is summed over features: at least those of float32."""
        return max(self.item, 4)

    @property
    def gradient(self) -> int:
        """Bytes of a number of a weight's gradient."""
        return max(self.item, 4) if self.gradients == "float32" else self.item

    @property
    def weights_cut(self) -> Any:
        return self.weights != REPLICATED

    @property
    def gathers(self) -> Any:
        """Where weights are gathered along z for their use."""
        return self.weights_cut & (self.z > 1)

    def bytes_of(self, what: Element) -> int:
        """Of one number of an activation or weight, of a sum over features, of a weight's gradient."""
        return {"item": self.item, "statistic": self.statistic, "gradient": self.gradient}[what]

    def row_parts(self, axis: str, always: bool = False) -> Any:
        """In how many parts an axis cuts the rows of an activation at rest that it does not index."""
        size = getattr(self, axis)
        return size if always else choose(self.sharded, size, 1)


def choose(condition: Any, first: Any, second: Any) -> Any:
    """Element by element: as numpy's `where`, but that fractions stay fractions."""
    return condition * first + (1 - condition) * second
