"""What lies between layers and needs no communication: attention on whole sequences of some heads, activation functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.specs.spec import LayerSpec, Side, Touched, other


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """Between queries, keys and values: whole sequences of some heads. `length` in pixels; None: the batch's sequence."""

    heads: int
    kv_heads: int
    head_dim: int
    head_axis: Side
    rotary: bool
    causal: bool
    length: int | None = None

    @property
    def queries(self) -> int:
        """Of each key in the serial model."""
        return self.heads // self.kv_heads

    def queries_here(self, c: ParallelConfig) -> int:
        """Of each key on a rank: fewer, where several ranks have copies of it."""
        ranks = int(c.size(self.head_axis))
        copies = ranks // self.kv_heads if ranks % self.kv_heads == 0 else 1
        return self.queries // copies if copies and self.queries % copies == 0 else self.queries

    def touched(self, c: ParallelConfig) -> None:
        return None

    def saved(self, c: ParallelConfig) -> Any:
        """Queries, keys and values where they were projected to, and what is inside."""
        numbers = (self.heads + 2 * self.kv_heads) * self.head_dim
        return c.rows(self.length) / c.size("x", "y") * numbers * c.item + self.inside(c)

    def inside(self, c: ParallelConfig) -> Any:
        """Of what is kept: queries and keys that were turned, the logarithms of sums, and the output."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        numbers = queries + keys if self.rotary else 0
        # The output is the next linear's input, unless that is gathered and kept so.
        copied = (c.size(other(self.head_axis)) > 1) & (1 - c.regathered)
        return c.rows(self.length) / c.size("x", "y") * (numbers * c.item + queries * c.item * copied + 4 * self.heads)

    def flops(self, sequence: int) -> float:
        length = sequence if self.length is None else self.length
        return 4.0 * length * length * self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class PointwiseSpec(LayerSpec):
    """An activation function, on features that lie on a side: so many come in and go out for each token or pixel.

    `kept`: of those that come in and of new ones, what it keeps for the backward.
    """

    side: Side
    inputs: int
    outputs: int
    kept: int
    pixels: int | None = None  # of a sample; None: tokens
    always: bool = False
    whole: bool = False  # every rank of the plane has all of it, a row for each sample

    def touched(self, c: ParallelConfig) -> Touched:
        nbytes = self.at_rest(c) * c.item
        return Touched(nbytes * (self.inputs + self.outputs), nbytes * (2 * self.inputs + self.outputs))

    def saved(self, c: ParallelConfig) -> Any:
        return self.at_rest(c) * self.kept * c.item

    def at_rest(self, c: ParallelConfig) -> Any:
        """Rows of a rank times the share of the features that it has."""
        if self.whole:
            return c.samples_of
        return c.rows(self.pixels) / c.row_parts(other(self.side), self.always) / c.size(self.side)
