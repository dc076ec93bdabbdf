"""A cut: how each layer of a model is sharded over the cube, declared as data beside the model.

    cut = {
        "embed": Embedding(),
        "blocks.*.norm1": Norm(),
        "blocks.*.attention.qkv": Expand(heads=12),
        "blocks.*.attention.proj": Contract(heads=12),
        ...
    }

Keys are module names, in which `*` stands for a number. A layer that *expands* takes features cut by x and returns
features cut by y; one that *contracts* does the reverse. Between a contract and the next expand (the residual stream)
features are cut by x, and rows by z and, if activations are sharded, y. Between expand and contract features are cut by
y, and rows by z and x.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from cubeloom.base.errors import UserError

Said = TypeVar("Said")


class CutError(UserError):
    """A model that cannot be cut on the given grid."""


class LayerError(CutError):
    """A layer that the cut does not name, or names as the wrong kind. `resolve` adds where the layer is called."""

    def __init__(self, layer: str, message: str) -> None:
        super().__init__(message)
        self.layer = layer


@cache
def pattern_of(name: str) -> str:
    """A module's name with its numbers replaced by `*`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def lookup(cut: Mapping[str, Said], name: str) -> Said | None:
    """The cut's entry for this module."""
    return cut.get(name) or cut.get(pattern_of(name))
