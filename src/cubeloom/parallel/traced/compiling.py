"""The blocks of a traced model compiled, and their layers left to Python: a graph of what lies between two layers.

Classes are changed and not modules, so that a copy of the model has its own, and equal blocks share what was compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from cubeloom.parallel import compiled
from cubeloom.parallel.specs import LayerSpec, TracedLossSpec
from cubeloom.parallel.traced.units import units_of


def compile_blocks(model: nn.Module, specs: Sequence[LayerSpec]) -> None:
    """Where layers have been replaced. Raises UserError where the model has no row of blocks."""
    layers = [spec.name for spec in specs if spec.name and not isinstance(spec, TracedLossSpec)]
    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.__class__ = _left_to_python(layer.__class__)
    for name in units_of(model, layers).blocks - {*layers}:
        block: Any = model.get_submodule(name)
        block.__class__ = _compiled(block.__class__, compiled.BACKEND)


@cache
def _left_to_python(kind: Any) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": torch.compiler.disable(kind.forward)})


@cache
def _compiled(kind: Any, backend: str) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": torch.compile(kind.forward, backend=backend, dynamic=False)})
