"""The decomposition of a model on a grid, and the size of a micro-batch: one decomposition, or arrays of a million.

Every closed form is written once for both. Arrays broadcast against each other: a search gives each setting its own
array axis, so every formula is computed only over the settings that it depends on. Numbers are floats, or exact
fractions when they are compared with the ledger.
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
FREED, KEPT, REPLICATED = range(3)  # how weights are stored along z
Precision = Literal["model", "fp8"]
Element = Literal["item", "statistic", "gradient", "operand"]
WEIGHTS: tuple[Weights, ...] = ("freed", "kept", "replicated")


@dataclass(frozen=True, kw_only=True)
class ShardingPolicy:
    """How operands are stored between their uses.

    Over forward and backward, sharded and replicated move the same bytes. Freeing a gathered copy costs one more
    gather.

    - `activations`: cut further along the axis that does not index them, or replicated along it;
    - `weights`, along z: sharded, and the gathered copy freed after the forward (and gathered again in the backward) or
      kept until the backward; or replicated, as in data parallelism;
    - `inputs` of linears for the weight gradient: the gathered copy kept, or only the shard, which is gathered again;
    - `gradients` of weights with a lower precision than float32: accumulated and reduced in float32, or in the model's
      dtype;
    - `precision` of the operands of linears (`LinearSpec.takes_fp8`): the model's dtype, or rounded to FP8 before they
      are gathered and multiplied.
    """

    activations: Activations = "sharded"
    weights: Weights = "freed"
    inputs: Inputs = "kept"
    gradients: GradientDtype = "float32"
    precision: Precision = "model"


@dataclass(frozen=True)
class Batch:
    """The batch of one step, over the whole grid."""

    samples: int
    """Sequences, or images, per step."""
    sequence: int
    """Tokens per sequence; 1 for images."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The grid, how operands are stored on it, and the size of one micro-batch."""

    data: Any
    z: Any
    y: Any
    x: Any
    samples: Any  # per micro-batch, over the whole grid
    sequence: int
    sharded: Any = True  # activations between layers
    weights: Any = FREED
    regathered: Any = False  # inputs of linears
    ways: Any = 1
    item: int = 2  # bytes per element
    gradients: GradientDtype = "float32"  # in which gradients of lower-precision weights are accumulated and reduced
    precision: Precision = "model"  # of the operands of linears
    first_step: bool = False  # the first step of FP8 multiplies in the model's dtype, and only measures
    record: Any = False  # stages are recorded wherever the grid allows it
    coordinates: Mapping[str, Any] = field(default_factory=lambda: {"pipe": 0, "data": 0, "z": 0, "y": 0, "x": 0})
    """The rank's coordinates: a turn moves different bytes on each of x and y, and copies of keys and values are on
    some z ranks.
    """
    rank_stride: dict[str, Any] = field(default_factory=dict)  # for each axis, the distance between neighbouring ranks

    @classmethod
    def exact(
        cls, grid: Grid, rest: ShardingPolicy, batch: Batch, item: int, coordinates: Mapping[str, int] | None = None
    ) -> ParallelConfig:
        """One decomposition, in fractions, for the rank at these coordinates, or for the first."""
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
            precision=rest.precision,
            coordinates={axis: Fraction(place) for axis, place in here.items()},
        )

    def size(self, *axes: str) -> Any:
        """The number of parts that these axes make together, in the arithmetic of the configuration; exactly 1 for
        none.
        """
        return prod((getattr(self, axis) for axis in axes), start=Fraction(1) if isinstance(self.x, Fraction) else 1)

    def rows(self, per_sample: int | None = None) -> Any:
        """Tokens of one rank of data and z, or pixels."""
        return self.samples_of * (self.sequence if per_sample is None else per_sample)

    @property
    def samples_of(self) -> Any:
        """Samples of one rank of data and z."""
        return self.samples / (self.data * self.z)

    def own_samples(self, side: str, always: bool = False) -> Any:
        """Samples of one rank, for an activation whose features are on this side of the plane."""
        return self.samples_of / self.row_parts("y" if side == "x" else "x", always)

    @property
    def recorded(self) -> Any:
        """Where a stage's actions are recorded and launched as one: without collectives and strands."""
        return self.record & (self.x * self.y * self.z == 1) & (self.ways == 1)

    @property
    def statistic(self) -> int:
        """Bytes of an element that is summed over features: at least those of float32."""
        return max(self.item, 4)

    @property
    def gradient(self) -> int:
        """Bytes of an element of a weight's gradient."""
        return max(self.item, 4) if self.gradients == "float32" else self.item

    @property
    def operand(self) -> int:
        """Bytes of an element of an operand of a linear that takes FP8."""
        return 1 if self.precision == "fp8" and not self.first_step else self.item

    @property
    def weights_cut(self) -> Any:
        return self.weights != REPLICATED

    @property
    def gathers(self) -> Any:
        """Where weights are all-gathered along z for their use."""
        return self.weights_cut & (self.z > 1)

    def bytes_of(self, what: Element) -> int:
        """Bytes of one element: of an activation or weight, of a statistic, of a weight's gradient, or of an operand."""
        return {
            "item": self.item,
            "statistic": self.statistic,
            "gradient": self.gradient,
            "operand": self.operand,
        }[what]

    def row_parts(self, axis: str, always: bool = False) -> Any:
        """The number of parts into which an axis that does not index an activation cuts its stored rows."""
        size = getattr(self, axis)
        return size if always else choose(self.sharded, size, 1)


def choose(condition: Any, first: Any, second: Any) -> Any:
    """Element-wise, as numpy's `where`, but fractions stay fractions."""
    return condition * first + (1 - condition) * second
