"""What lies between layers and needs no communication: attention on whole sequences of some heads, activation functions."""

from __future__ import annotations

from dataclasses import dataclass

from cubeloom.parallel.specs.spec import LayerSpec, Side


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
