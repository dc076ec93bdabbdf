"""Forms of the layers that networks on images have besides convolutions, which are `LinearForm`s.

Features of an image lie on one `side`, x or y; its samples on data and z and, where activations rest sharded, on the other
side as well. Tensors are `[samples, features, pixels…]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from cubeloom.base.grid import Grid
from cubeloom.parallel.amounts import Summed, Volume, Words, add, ring, sum_volume
from cubeloom.parallel.cut import Side
from cubeloom.parallel.forms import Batch, Form, Spread, divides, other, rows_to_cut


@dataclass(frozen=True)
class ImageForm(Form):
    side: Side
    rows: Spread

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes that cut samples."""
        return ("data", "z", other(self.side)) if self.rows == Spread.ROWS else ("data", "z")

    def samples(self, grid: Grid, batch: Batch) -> Fraction:
        """Samples of one rank."""
        return Fraction(batch.samples_of(grid), grid.size(other(self.side)) if self.rows == Spread.ROWS else 1)

    def gradients(self, grid: Grid) -> dict[str, Summed]:
        """What is left to sum of each parameter's gradient after a backward."""
        return {}

    def volume(self, grid: Grid, batch: Batch, words: Words) -> Volume:
        """Bytes of one forward and backward, without the sums over replicas."""
        return {}

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        if self.rows == Spread.ROWS:
            yield from divides(*rows_to_cut(True, grid, batch), grid, other(self.side))


@dataclass(frozen=True)
class WeightedForm(ImageForm):
    """A linear or convolution of which each rank of the side holds its part for good."""

    k: int
    n: int
    taps: int  # numbers a weight has for each pair of features
    bias: bool

    cuts_inputs: ClassVar[bool] = False  # a rank's weight has its part of the input features, and all output features

    def parts_of_bias(self, grid: Grid) -> int:
        return grid.size(self.side)

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """The axes along which other samples meet the same part."""
        return self.row_axes

    @property
    def numbers(self) -> int:
        """Of the whole weight."""
        return self.k * self.n * self.taps

    def gradients(self, grid: Grid) -> dict[str, Summed]:
        own = Fraction(self.n, self.parts_of_bias(grid))
        numbers, rows = Fraction(self.numbers, grid.size(self.side)), self.n if self.cuts_inputs else own
        found = {"weight": Summed(numbers, self.weight_axes, rows)}
        if self.bias:
            found["bias"] = Summed(own, self.row_axes, own)
        return found


@dataclass(frozen=True)
class SliceForm(WeightedForm):
    """From features that every rank has whole to features on the side: each rank computes its own, for its own samples."""

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        yield from super().problems(grid, batch)
        yield from divides("output features", self.n, grid, self.side)


@dataclass(frozen=True)
class JoinForm(WeightedForm):
    """From features on the side to features that every rank of the side has whole: few, such as colours."""

    pixels: tuple[int, int]
    cuts_inputs: ClassVar[bool] = True

    def parts_of_bias(self, grid: Grid) -> int:
        return 1

    def volume(self, grid: Grid, batch: Batch, words: Words) -> Volume:
        count = self.samples(grid, batch) * self.pixels[1] * self.n
        return sum_volume(Summed(count, (self.side,)), grid, words)

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        yield from super().problems(grid, batch)
        yield from divides("input features", self.k, grid, self.side)


@dataclass(frozen=True)
class StayForm(WeightedForm):
    """From features on the side to features on the side: the sum over the side is scattered by features.

    Samples are cut over the other side even where activations rest replicated, so that nothing is computed twice.
    """

    pixels: tuple[int, int]
    cuts_inputs: ClassVar[bool] = True

    @property
    def weight_axes(self) -> tuple[str, ...]:
        return ("data", "z", other(self.side))

    def volume(self, grid: Grid, batch: Batch, words: Words) -> Volume:
        parts, across = grid.size(self.side), grid.size(other(self.side))
        into, out = (batch.rows(grid, pixels) * words.item for pixels in self.pixels)
        scattered: Volume = {self.side: 2 * ring(parts) * Fraction(out * self.n, across)}
        if self.rows == Spread.ROWS:
            return add(scattered)
        # The output's samples are gathered in the forward, the input gradient's in the backward.
        whole = Fraction(out * self.n + into * self.k, parts)
        return add(scattered, {other(self.side): ring(across) * whole})

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        yield from divides(*rows_to_cut(True, grid, batch), grid, other(self.side))
        yield from divides("input features", self.k, grid, self.side)
        yield from divides("output features", self.n, grid, self.side)


@dataclass(frozen=True)
class GroupedForm(WeightedForm):
    """A convolution in groups, of which each rank has whole ones: from features on the side to features on the side."""

    groups: int

    @property
    def numbers(self) -> int:
        return super().numbers // self.groups

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        yield from super().problems(grid, batch)
        yield from divides("groups", self.groups, grid, self.side)


@dataclass(frozen=True)
class ShareForm(ImageForm):
    """Where many layers of the plane begin to use whole features: their gradients are summed over x and y here, once."""

    features: int

    def volume(self, grid: Grid, batch: Batch, words: Words) -> Volume:
        return sum_volume(Summed(Fraction(batch.samples_of(grid) * self.features), ("x", "y")), grid, words)


@dataclass(frozen=True)
class ImageNormForm(ImageForm):
    """A norm that sums two numbers for each of its statistics in the forward, and two in the backward."""

    features: int
    affine: bool

    def gradients(self, grid: Grid) -> dict[str, Summed]:
        own = Fraction(self.features, grid.size(self.side))
        vector = Summed(own, self.row_axes, own)
        return {"weight": vector, "bias": vector} if self.affine else {}

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        yield from super().problems(grid, batch)
        yield from divides("features", self.features, grid, self.side)


@dataclass(frozen=True)
class GroupNormForm(ImageNormForm):
    """Sums of mean and spread over the ranks that share groups; none where each rank has whole ones."""

    groups: int
    interleaved: bool  # features of two tensors in turns, so that a rank's are not whole groups

    def local(self, grid: Grid) -> bool:
        return self.groups % grid.size(self.side) == 0 and not self.interleaved

    def volume(self, grid: Grid, batch: Batch, words: Words) -> Volume:
        if self.local(grid):
            return {}
        count = 4 * self.samples(grid, batch) * self.groups
        return sum_volume(Summed(count, (self.side,)), grid, Words(words.statistic))


@dataclass(frozen=True)
class BatchNormForm(ImageNormForm):
    """Statistics of all samples of the whole batch, as the serial model has."""

    def volume(self, grid: Grid, batch: Batch, words: Words) -> Volume:
        count = 4 * Fraction(self.features, grid.size(self.side))
        return sum_volume(Summed(count, self.row_axes), grid, Words(words.statistic))


@dataclass(frozen=True)
class ConcatForm(ImageForm):
    """Two tensors' features in turns of so many parts: cut over a side that divides them, each rank has whole turns."""

    parts: int

    def problems(self, grid: Grid, batch: Batch) -> Iterator[str]:
        yield from divides("parts of a concatenation,", self.parts, grid, self.side)


@dataclass(frozen=True)
class SquaredLossForm(ImageForm):
    """The mean squared error over all samples, of features that every rank of the side has whole."""

    def volume(self, grid: Grid, batch: Batch, words: Words) -> Volume:
        return sum_volume(Summed(Fraction(2), self.row_axes), grid, Words(words.statistic))
