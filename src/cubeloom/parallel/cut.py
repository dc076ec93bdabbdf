"""A cut: how each layer of a model lies on the cube, declared as data beside the model.

    cut = {
        "embed": Embedding(),
        "blocks.*.norm1": Norm(),
        "blocks.*.attention.qkv": Expand(heads=12),
        "blocks.*.attention.proj": Contract(heads=12),
        ...
    }

Keys are module names, `*` standing for a number. A layer that *expands* takes features that lie on x and gives features
that lie on y; one that *contracts* takes them back. Between a contract and the next expand (the residual stream) features
lie on x and, where activations rest sharded, rows on z and y; between expand and contract it is y, and z and x.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from cubeloom.base.errors import UserError

Side = Literal["x", "y"]
Activations = Literal["sharded", "replicated"]
Weights = Literal["freed", "kept", "replicated"]
Inputs = Literal["kept", "regathered"]
GradientDtype = Literal["float32", "model"]


@dataclass(frozen=True, kw_only=True)
class Rest:
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
class Expand:
    """A linear or convolution from features on x to features on y.

    `heads`: the output is attention's input, made of so many equal groups of features that must stay whole. Its sum over x is
    scattered over them, so that each rank has whole sequences of heads/(x·y) heads and no attention is computed twice.
    `sharded_input`, `sharded_output`: rows are cut on that side even where activations rest replicated.
    `turn`: afterwards redistribute, so that features lie on x again (for an odd number of linears in a row).
    `stream`: where the stream of activations lies on y, as behind an odd number of convolutions, an expand leads back to
    it, and its heads are those of its input.
    """

    heads: int | None = None
    sharded_input: bool = False
    sharded_output: bool = False
    turn: bool = False
    stream: Side = "x"


@dataclass(frozen=True)
class Contract:
    """A linear or convolution from features on y to features on x. `heads` as in Expand, of its input.

    Where the `stream` of activations lies on y, it comes first and an expand second: then its heads are those of its output.
    `turn`: afterwards redistribute, so that features lie on y again.
    """

    heads: int | None = None
    turn: bool = False
    stream: Side = "x"


@dataclass(frozen=True)
class Norm:
    """A norm of features that lie on `side`: LayerNorm and RMSNorm on x only, GroupNorm and BatchNorm on either.

    `sharded`: its rows are cut even where activations rest replicated.
    """

    sharded: bool = False
    side: Side = "x"


@dataclass(frozen=True)
class Embedding:
    """A table of vectors looked up by token: vocabulary over y, features over x, shards over z."""


@dataclass(frozen=True)
class Table:
    """A small table looked up by every rank for its own rows, such as positions: features over x, entries over y and z."""


@dataclass(frozen=True)
class Dropout:
    """Dropout of the residual stream, with a mask that depends on seed, step and position alone."""


@dataclass(frozen=True)
class Loss:
    """The mean cross-entropy of logits whose classes lie on y and whose rows on z and x.

    `whole`: every rank of x and y has all classes and all rows of its z rank.
    """

    whole: bool = False


@dataclass(frozen=True)
class FirstToken:
    """Whole features of each sequence's first token, the same on all ranks of x and y."""

    features: int


@dataclass(frozen=True)
class Whole:
    """A small layer that every rank of x and y computes in full, on input that is whole."""


@dataclass(frozen=True)
class Slice:
    """A linear or convolution from features that every rank has whole (few, or small) to features on `side`."""

    side: Side = "x"


@dataclass(frozen=True)
class Join:
    """A linear or convolution from features on `side` to few features that every rank of it gets whole."""

    side: Side = "x"


@dataclass(frozen=True)
class Stay:
    """A small linear or convolution, such as a skip connection's, from features on `side` to features on `side`.

    Each rank has all output features of its part of the input's, and computes them for its own samples.
    """

    side: Side = "x"


@dataclass(frozen=True)
class Share:
    """A module that only passes on whole features to many `Slice`s: the sum of their gradients is made here, once."""

    features: int


@dataclass(frozen=True)
class Grouped:
    """A convolution in groups, from features on `side` to features on `side`: each rank has whole groups."""

    side: Side = "x"


@dataclass(frozen=True)
class Concat:
    """A module that joins the features of two tensors on `side`, in turns of its `parts`."""

    side: Side = "x"


@dataclass(frozen=True)
class SquaredLoss:
    """The mean squared error of features that every rank of `side` has whole."""

    side: Side = "x"


Kind = (
    Expand
    | Contract
    | Norm
    | Embedding
    | Table
    | Dropout
    | Loss
    | FirstToken
    | Whole
    | Slice
    | Join
    | Stay
    | Share
    | Grouped
    | Concat
    | SquaredLoss
)
Cut = Mapping[str, Kind]


def written(kind: Kind) -> str:
    """As a user writes it: `Expand(heads=12)`."""
    given = (
        f"{each.name}={getattr(kind, each.name)!r}" for each in fields(kind) if getattr(kind, each.name) != each.default
    )
    return f"{type(kind).__name__}({', '.join(given)})"


def pattern_of(name: str) -> str:
    """A module's name with its numbers as `*`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def lookup(cut: Cut, name: str) -> Kind | None:
    """What the cut says of this module."""
    return cut.get(name) or cut.get(pattern_of(name))


class CutError(UserError):
    """A model that cannot be cut on the given grid."""


class LayerError(CutError):
    """A layer that the cut does not name, or cannot take for what it names it. `resolve` adds where the layer is called."""

    def __init__(self, layer: str, message: str) -> None:
        super().__init__(message)
        self.layer = layer
