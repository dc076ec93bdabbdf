"""A model as its list of layers: sizes alone, the same on every grid. No torch here.

`derive` takes the list from the real modules; the closed forms read it. Fields are those of `cubeloom.parallel.forms` that do
not depend on a grid; `always` says that rows are cut even where activations rest replicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Side = Literal["x", "y"]


def other(side: Side) -> Side:
    return "y" if side == "x" else "x"


@dataclass(frozen=True, kw_only=True)
class Layer:
    name: str


@dataclass(frozen=True, kw_only=True)
class Linear(Layer):
    """A linear or a convolution inside the network. `pixels` of a sample come in and go out; None: tokens."""

    k: int
    n: int
    side: Side  # of the input's features
    bias: bool
    taps: int = 1
    pixels: tuple[int, int] | None = None
    transposed: bool = False
    turn: bool = False
    shares: str | None = None  # the layer whose weight it uses
    heads: int | None = None
    head_axis: Side = "y"
    always_in: bool = False
    always_out: bool = False
    with_loss: bool = False  # computed together with the loss that reads it, where the grid allows it

    @property
    def k_axis(self) -> Side:
        return self.side

    @property
    def n_axis(self) -> Side:
        return other(self.side)

    @property
    def bias_axis(self) -> Side:
        return self.k_axis if self.turn else self.n_axis


@dataclass(frozen=True, kw_only=True)
class Norm(Layer):
    """LayerNorm (centred) or RMSNorm of the residual stream."""

    features: int
    centred: bool
    bias: bool
    always: bool = False


@dataclass(frozen=True, kw_only=True)
class Embedding(Layer):
    entries: int
    features: int


@dataclass(frozen=True, kw_only=True)
class Table(Layer):
    entries: int
    features: int


@dataclass(frozen=True, kw_only=True)
class Loss(Layer):
    classes: int
    smoothing: bool
    whole: bool


@dataclass(frozen=True, kw_only=True)
class FirstToken(Layer):
    features: int


@dataclass(frozen=True, kw_only=True)
class Whole(Layer):
    k: int
    n: int
    bias: bool


@dataclass(frozen=True, kw_only=True)
class Edge(Layer):
    """A linear or convolution of which each rank of the side holds its part for good: see `parallel.image_forms`."""

    kind: Literal["slice", "join", "stay", "grouped"]
    side: Side
    k: int
    n: int
    taps: int
    bias: bool
    pixels: tuple[int, int]
    groups: int = 1


@dataclass(frozen=True, kw_only=True)
class ImageNorm(Layer):
    """A GroupNorm, or a BatchNorm where there are no groups."""

    side: Side
    features: int
    affine: bool
    pixels: int
    groups: int | None = None
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class Share(Layer):
    features: int


@dataclass(frozen=True, kw_only=True)
class Concat(Layer):
    side: Side
    parts: int


@dataclass(frozen=True, kw_only=True)
class SquaredLoss(Layer):
    side: Side


@dataclass(frozen=True, kw_only=True)
class Attention(Layer):
    """Between queries, keys and values: whole sequences of some heads. `length` in pixels; None: the batch's sequence."""

    heads: int
    kv_heads: int
    head_dim: int
    head_axis: Side
    rotary: bool
    causal: bool
    length: int | None = None


@dataclass(frozen=True, kw_only=True)
class Pointwise(Layer):
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


Any = (
    Linear
    | Norm
    | Embedding
    | Table
    | Loss
    | FirstToken
    | Whole
    | Edge
    | ImageNorm
    | Share
    | Concat
    | SquaredLoss
    | Attention
    | Pointwise
)


@dataclass(frozen=True, kw_only=True)
class Handed:
    """A tensor that a piece hands to the next: numbers of a token (or sample), and where its features lie; None: whole."""

    numbers: int
    side: Side | None
    always: bool


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a pipeline does not cut: a block, or what stands before or behind the blocks."""

    layers: tuple[Any, ...]
    handed: tuple[Handed, ...]
    losses: int = 0  # whose targets are counted over the ranks, once a step

    @cached_property
    def weights(self) -> frozenset[str]:
        """Names of the weights that it uses: another piece may have them too."""
        return frozenset(f"{getattr(layer, 'shares', None) or layer.name}.weight" for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A row of pieces, each of one of a few `kinds`."""

    name: str
    tokens: bool  # rows are tokens; otherwise the pixels of samples
    sequence: int  # the longest, where rows are tokens; otherwise 1
    kinds: tuple[Piece, ...]
    row: tuple[int, ...]  # the kind of each piece
    cuts: dict[int, tuple[int, ...]]  # for each number of stages, where each stage's pieces end

    @cached_property
    def tied(self) -> frozenset[str]:
        """Names of the weights that two layers share."""
        shared = {layer.shares for kind in self.kinds for layer in kind.layers if isinstance(layer, Linear)}
        return frozenset(f"{owner}.weight" for owner in shared if owner is not None)

    @cached_property
    def has_batch_norm(self) -> bool:
        return any(
            isinstance(layer, ImageNorm) and layer.groups is None for kind in self.kinds for layer in kind.layers
        )

    def stages(self, count: int) -> tuple[tuple[int, ...], ...]:
        """For each stage how many pieces of each kind it has."""
        ends = self.cuts[count]
        starts = (0, *ends[:-1])
        return tuple(
            tuple(self.row[start:end].count(kind) for kind in range(len(self.kinds)))
            for start, end in zip(starts, ends, strict=True)
        )
