"""Decompositions as arrays: every closed form is written once, for one of them or for a million.

Arrays broadcast against each other, so that a search gives each setting an axis of its own and every formula is computed over
the settings that it depends on and no others. They hold floats, or, to be compared with the ledger, exact fractions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from cubeloom.plan.costs import Quantity

GradientDtype = Literal["float32", "model"]
FREED, KEPT, REPLICATED = range(3)  # how weights rest along z
WEIGHTS = ("freed", "kept", "replicated")
# What is computed once more in a backward: nothing, what is inside attention, or a stage's whole forward.
Recompute = Literal[False, "attention", True]
RECOMPUTE: dict[Recompute, str] = {False: "none", "attention": "selective", True: "full"}


@dataclass(frozen=True, kw_only=True)
class Settings:
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
    place: tuple[Any, Any] = (0, 0)  # of the rank on x and y: a turn moves different bytes on each
    inner: dict[str, Any] = field(default_factory=dict)  # for each axis how many ranks lie between neighbours on it

    def size(self, *axes: str) -> Quantity:
        return prod((getattr(self, axis) for axis in axes), start=1)

    def rows(self, per_sample: int | None = None) -> Quantity:
        """Tokens of one rank of data and z, or pixels."""
        return self.samples_of * (self.sequence if per_sample is None else per_sample)

    @property
    def samples_of(self) -> Quantity:
        """Samples of one rank of data and z."""
        return self.samples / (self.data * self.z)

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

    def further(self, axis: str, always: bool = False) -> Quantity:
        """In how many parts an axis cuts the rows of an activation at rest that it does not index."""
        size = getattr(self, axis)
        return size if always else choose(self.sharded, size, 1)


def choose(condition: Any, first: Any, second: Any) -> Any:
    """Element by element: as numpy's `where`, but that fractions stay fractions."""
    return condition * first + (1 - condition) * second
