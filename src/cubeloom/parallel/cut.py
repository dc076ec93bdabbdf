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
from typing import TypeVar

from cubeloom.base.errors import UserError

Said = TypeVar("Said")


class CutError(UserError):
    """A model that cannot be cut on the given grid."""


class LayerError(CutError):
    """A layer that the cut does not name, or cannot take for what it names it. `resolve` adds where the layer is called."""

    def __init__(self, layer: str, message: str) -> None:
        super().__init__(message)
        self.layer = layer


def pattern_of(name: str) -> str:
    """A module's name with its numbers as `*`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def lookup(cut: Mapping[str, Said], name: str) -> Said | None:
    """What the cut says of this module."""
    return cut.get(name) or cut.get(pattern_of(name))
