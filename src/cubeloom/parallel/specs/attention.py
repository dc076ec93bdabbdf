"""Operations between layers without communication: attention over whole sequences, and activation functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.specs.spec import LayerSpec, Side, Touched, other


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """Attention over whole sequences of a rank's heads. `length` in pixels; None means the batch's sequence length."""

    heads: int
    kv_heads: int
    head_dim: int
    head_axis: Side
    rotary: bool
    causal: bool
    length: int | None = None

    @property
    def queries(self) -> int:
        """Queries per key in the serial model."""
        return self.heads // self.kv_heads

    def queries_here(self, c: ParallelConfig) -> int:
        """Queries per key on a rank. There are fewer if several ranks have copies of the key."""
        ranks = int(c.size(self.head_axis))
        copies = ranks // self.kv_heads if ranks % self.kv_heads == 0 else 1
        return self.queries // copies if copies and self.queries % copies == 0 else self.queries

    def touched(self, c: ParallelConfig) -> None:
        return None

    def saved(self, c: ParallelConfig) -> Any:
        """Bytes of queries, keys and values in the layout of the projection, and of what attention keeps."""
        numbers = (self.heads + 2 * self.kv_heads) * self.head_dim
        return c.rows(self.length) / c.size("x", "y") * numbers * c.item + self.inside(c)

    def inside(self, c: ParallelConfig) -> Any:
        """Bytes that attention keeps: rotated queries and keys, the log-sum-exps, and the output."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        numbers = queries + keys if self.rotary else 0
        # The output is the input of the next linear, unless the linear keeps a gathered copy.
        copied = (c.size(other(self.head_axis)) > 1) & (1 - c.regathered)
        return c.rows(self.length) / c.size("x", "y") * (numbers * c.item + queries * c.item * copied + 4 * self.heads)

    def flops(self, sequence: int) -> float:
        length = sequence if self.length is None else self.length
        return 4.0 * length * length * self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class PointwiseSpec(LayerSpec):
    """An activation function on features of one side, with sizes per token or pixel.

    `kept`: how many features it keeps for the backward, of its inputs and of new ones.
    """

    side: Side
    inputs: int
    outputs: int
    kept: int
    pixels: int | None = None  # per sample; None: tokens
    always: bool = False
    whole: bool = False  # every rank of the plane has all features, and one row per sample

    def touched(self, c: ParallelConfig) -> Touched:
        nbytes = self.at_rest(c) * c.item
        return Touched(nbytes * (self.inputs + self.outputs), nbytes * (2 * self.inputs + self.outputs))

    def saved(self, c: ParallelConfig) -> Any:
        return self.at_rest(c) * self.kept * c.item

    def at_rest(self, c: ParallelConfig) -> Any:
        """Elements on a rank: its rows times its share of the features."""
        if self.whole:
            return c.samples_of
        return c.rows(self.pixels) / c.row_parts(other(self.side), self.always) / c.size(self.side)
